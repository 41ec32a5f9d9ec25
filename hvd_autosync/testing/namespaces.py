"""Linux namespaces that exist exactly as long as the process that made them.

A :class:`Box` is one small shell in namespaces of its own: mounts, host name, shared memory,
network and processes. The shell ends when the pipe to its owner closes, even if the owner is
killed. The kernel then ends every process of the box and removes its interfaces and files. Nothing
has a name outside the box, so that boxes cannot collide and leave nothing to clean up.

Making a box needs root, or a user namespace in which a user counts as root
(:func:`run_as_namespace_root`).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from hvd_autosync.errors import AutosyncError

_CLONE_NEWPID = 0x20000000
#: Longest time until the processes of a box have ended, which takes long on a busy machine.
_PATIENCE_S = 60.0
#: Where system tools are, also for users whose PATH lacks these folders.
TOOL_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_NAMESPACES = ("--mount", "--uts", "--ipc", "--net")
#: The box's first process, which reaps orphans while it waits for the end of the pipe.
_HOLD = 'hostname "$0" && echo ready && cat > /dev/null'
#: Users who count as root cannot change their groups, which nsenter otherwise tries.
_AS_ROOT = ("--user", "--preserve-credentials")


class TestbedError(AutosyncError):
    """Hosts cannot be made on this machine, or have ended unexpectedly."""

    __test__ = False  # pytest collects classes by their name


def _set_namespace(fd: int, kind: int) -> None:
    """Call ``setns(2)`` for the calling thread."""
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
    # A change of the mount namespace resets the working directory.
    folder = Path(cwd or os.curdir).absolute()
    enter = ["nsenter", f"--target={pid}", *namespaces, *_on(os.sched_getaffinity(pid))]
    return [*enter, "env", f"--chdir={folder}", *command]


def _on(processors: Iterable[int]) -> list[str]:
    """Return the beginning of a command that runs on these processors alone."""
    return ["taskset", "--cpu-list", ",".join(map(str, sorted(processors)))]


def enter_command(pid: int, command: Sequence[str], *, user: bool = False) -> list[str]:
    """Return ``command`` inside the box of :attr:`Box.pid`, for processes that do not own it.

    Args:
        pid: A process that holds the box.
        command: Program and arguments.
        user: Whether the box has users of its own.

    Raises:
        TestbedError: The box has ended, or the kernel does not list children.
    """
    # The holder is outside the box's process namespace; its child is the first process inside.
    try:
        first = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    except (OSError, IndexError):
        raise TestbedError(
            f"no first process of a test host is known: its holder {pid} has no child",
            hint="Create the hosts again; the kernel needs CONFIG_PROC_CHILDREN.",
        ) from None
    return _entered(first, (*(_AS_ROOT if user else ()), *_NAMESPACES, "--pid"), command)


def run_as_namespace_root(command: Sequence[str]) -> int:
    """Run a command that may make boxes, without being root; return its exit status.

    The command runs in a box in which this user counts as root. When it ends, or this process
    does, every process that it left is killed.

    Raises:
        TestbedError: The kernel refuses new namespaces.
    """
    with closing(Box("testbed", user=True)) as box:
        return subprocess.run(enter_command(box.pid, command, user=True)).returncode


class Box:
    """Namespaces with a shell that holds them.

    Args:
        name: The box's host name.
        user: Make a user namespace too, in which this user counts as root. Such a box can only be
            entered with :func:`enter_command`.
        processes: Make a process namespace. Without it the box's processes outlive the box: its
            owner has to be in a box whose end kills them.
        processors: Numbers of the processors on which its processes run; ``None``: the owner's.

    Raises:
        TestbedError: The kernel refuses new namespaces.
    """

    def __init__(
        self,
        name: str,
        *,
        user: bool = False,
        processes: bool = True,
        processors: Iterable[int] | None = None,
    ) -> None:
        self._children: list[subprocess.Popen[Any]] = []
        self._holder = subprocess.Popen(
            [
                # Whoever enters it looks at the holder's.
                *_on(os.sched_getaffinity(0) if processors is None else processors),
                "unshare",
                *(("--user", "--map-root-user") if user else ()),
                *_NAMESPACES,
                *(("--pid", "--fork", "--kill-child", "--mount-proc") if processes else ()),
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
            start_new_session=True,  # Ctrl-C must reach only the owner
        )
        assert self._holder.stdout is not None
        line = self._holder.stdout.readline()
        if line != b"ready\n":
            self.close()
            raise TestbedError(
                f"cannot make namespaces: {line.decode(errors='replace').strip()}",
                hint="Call testbed_missing() for what this machine lacks.",
            )

    @property
    def pid(self) -> int:
        """A process whose namespaces, except perhaps that of processes, are the box's."""
        return self._holder.pid

    @property
    def on_processors(self) -> list[str]:
        """The beginning of a command that runs on the box's processors."""
        return _on(os.sched_getaffinity(self.pid))

    def write(self, path: str, text: str, mode: int = 0o600) -> None:
        """Write a file; ``path`` is inside the box, ``mode`` is for a new file."""
        file = Path(f"/proc/{self.pid}/root{path}")
        file.touch(mode)
        file.write_text(text)

    def read(self, path: str) -> str:
        """Return the text of a file; ``path`` is inside the box."""
        return Path(f"/proc/{self.pid}/root{path}").read_text()

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of the box except the first."""
        own = Path(f"/proc/{self.pid}/ns/pid_for_children").readlink()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # ended meanwhile
                inside = (folder / "ns" / "pid").readlink() == own
                # The first process of a namespace has the number 1 in it.
                if inside and (folder / "status").read_text().split("NSpid:")[1].split()[1] != "1":
                    os.kill(int(folder.name), number)

    @property
    def listening_ports(self) -> set[int]:
        """TCP ports on which processes of the box listen."""
        rows = [line.split() for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()]
        return {int(row[1].rpartition(":")[2], 16) for row in rows[1:] if row[3] == "0A"}

    @contextmanager
    def _children_inside(self) -> Iterator[None]:
        """Start this thread's child processes inside the box while the context is open.

        ``nsenter --pid`` would add a process between them and signals from here.
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
        """Call :func:`subprocess.run` inside the box."""
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
        """Start a :class:`subprocess.Popen` inside the box; its ``pid`` is the command's."""
        with self._children_inside():
            child = subprocess.Popen(self._inside(command, cwd), env=env, **options)
        self._children.append(child)
        return child

    def close(self) -> None:
        """End every process of the box and wait for their end."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        try:
            self._holder.stdin.close()
            # The kernel kills them, but the namespace stays until their parent has waited for them.
            for child in self._children:
                child.wait(_PATIENCE_S)
            self._holder.wait(_PATIENCE_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._holder.kill()
            self._holder.wait()
        self._holder.stdout.close()


def run_tool(box: Box | None, *command: str, text: str = "") -> None:
    """Run a system tool inside ``box``, or outside of all; ``text`` is its input.

    Raises:
        TestbedError: It failed.
    """
    environment = {"PATH": TOOL_PATH}
    run: Callable[..., subprocess.CompletedProcess[Any]] = box.run if box else subprocess.run
    done = run(command, env=environment, cwd="/", input=text, capture_output=True, text=True)
    if done.returncode:
        raise TestbedError(
            f"{command[0]} failed: {done.stderr.strip()}",
            hint="Call testbed_missing() for what this machine lacks.",
        )
