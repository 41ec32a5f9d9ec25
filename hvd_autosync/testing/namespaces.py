"""Linux namespaces that live exactly as long as the process that made them.

A :class:`Box` is one small shell in namespaces of its own: mounts, host name, shared memory,
network and processes. The shell ends when the pipe to its owner closes, however the owner ends,
and the kernel then ends every process of the box and drops its interfaces and files. Nothing has
a name outside the box, so that boxes cannot collide and nothing is left to clean up.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hvd_autosync.errors import AutosyncError

_CLONE_NEWPID = 0x20000000
_PATIENCE_S = 5.0
_NAMESPACES = ("--mount", "--uts", "--ipc", "--net")
#: The box's first process: it reaps orphans while it waits for the end of the pipe.
_HOLD = 'echo "$0" > /proc/sys/kernel/hostname && echo ready && cat > /dev/null'


class TestbedError(AutosyncError):
    """Hosts on this machine cannot be made, or ended while they were needed."""

    __test__ = False  # pytest collects classes by their name


def _set_namespace(fd: int, kind: int) -> None:
    """``setns(2)`` for the calling thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _entered(
    pid: int,
    namespaces: Sequence[str],
    command: Sequence[str],
    cwd: str | os.PathLike[str] | None = None,
) -> list[str]:
    # A change of mount namespace forgets the working directory.
    folder = os.path.abspath(cwd or os.curdir)
    return ["nsenter", f"--target={pid}", *namespaces, "env", f"--chdir={folder}", *command]


def enter_command(pid: int, command: Sequence[str]) -> list[str]:
    """``command`` inside the box of :attr:`Box.pid`, for a process that did not make the box."""
    # The holder itself is outside of the processes that it holds; its child is the first inside.
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        first = int(children.read().split()[0])
    return _entered(first, (*_NAMESPACES, "--pid"), command)


class Box:
    """Namespaces with a shell that holds them.

    Args:
        name: Its host name.

    Raises:
        TestbedError: The kernel refuses.
    """

    def __init__(self, name: str) -> None:
        self._children: list[subprocess.Popen[Any]] = []
        self._holder = subprocess.Popen(
            [
                "unshare",
                *_NAMESPACES,
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "--propagation",
                "private",
                "sh",
                "-c",
                _HOLD,
                name,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the owner
        )
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline()
        if said != b"ready\n":
            self.close()
            raise TestbedError(
                f"no namespaces: {said.decode(errors='replace').strip()}",
                hint="Ask testbed_missing() for what this machine lacks.",
            )

    @property
    def pid(self) -> int:
        """A process whose namespaces are those of the box; its children's are the box's, too."""
        return self._holder.pid

    def write(self, path: str, text: str, mode: int = 0o600) -> None:
        """Write the file ``path``, as the box sees it; ``mode`` is for a new file."""
        file = Path(f"/proc/{self.pid}/root{path}")
        file.touch(mode)
        file.write_text(text)

    def read(self, path: str) -> str:
        """The text of the file ``path``, as the box sees it."""
        return Path(f"/proc/{self.pid}/root{path}").read_text()

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of the box but its first."""
        own = os.readlink(f"/proc/{self.pid}/ns/pid_for_children")
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # gone meanwhile
                inside = os.readlink(folder / "ns" / "pid") == own
                # The first process of a namespace has the number 1 in it.
                if inside and (folder / "status").read_text().split("NSpid:")[1].split()[1] != "1":
                    os.kill(int(folder.name), number)

    @property
    def listening_ports(self) -> set[int]:
        """TCP ports on which something in the box listens."""
        rows = [line.split() for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()]
        return {int(row[1].rpartition(":")[2], 16) for row in rows[1:] if row[3] == "0A"}

    @contextmanager
    def _children_inside(self) -> Iterator[None]:
        """Processes started by this thread meanwhile are processes of the box.

        ``nsenter --pid`` would stand between them and signals of ours.
        """
        with (
            open("/proc/self/ns/pid") as home,
            open(f"/proc/{self.pid}/ns/pid_for_children") as inside,
        ):
            _set_namespace(inside.fileno(), _CLONE_NEWPID)
            try:
                yield
            finally:
                _set_namespace(home.fileno(), _CLONE_NEWPID)

    def _inside(self, command: Sequence[str], cwd: str | os.PathLike[str] | None) -> list[str]:
        return _entered(self.pid, _NAMESPACES, command, cwd)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """:func:`subprocess.run` inside the box."""
        with self._children_inside():
            return subprocess.run(self._inside(command, cwd), env=env, **options)

    def popen(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """:class:`subprocess.Popen` inside the box; its ``pid`` and signals are the command's."""
        with self._children_inside():
            child = subprocess.Popen(self._inside(command, cwd), env=env, **options)
        self._children.append(child)
        return child

    def close(self) -> None:
        """End every process of the box and wait until they are gone."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        try:
            self._holder.stdin.close()
            # The kernel kills them, and keeps the namespace until their parent has seen it.
            for child in self._children:
                child.wait(_PATIENCE_S)
            self._holder.wait(_PATIENCE_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._holder.kill()
            self._holder.wait()
        self._holder.stdout.close()
