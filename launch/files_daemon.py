"""The files daemon: a small process that keeps a trial's mount namespace on one host.

It sends the namespace to the ranks that connect. When the last process of the trial has ended, it
reports the written files to the driver and exits.
"""

from __future__ import annotations

import array
import contextlib
import os
import selectors
import shutil
import socket
import stat
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvd_autosync.launch import namespaces
from hvd_autosync.launch.stage import LAYERS
from hvd_autosync.runtime.driver.processes import DAEMON_NAME
from hvd_autosync.runtime.driver.wire import write_message

#: Message number; far above those of the ranks, which start at 0.
_NUMBER = 2 * 10**8
#: Interval between measurements of the space that written files take.
_POLL_S = 0.5
#: If less than this is free, a file may not have fitted.
_FULL_BYTES = 1 << 20


@dataclass(frozen=True)
class DaemonTask:
    """The arguments of a files daemon.

    Attributes:
        rank: Rank under which its message is sent.
        name: Name of the trial's run.
        key: Key of the trial's messages.
        listener: Descriptor of the socket to which ranks connect.
        spaces: Descriptors of the mount namespace and, if there is one, of the user namespace.
        written: Descriptor of the folder that holds the upper folders.
        folders: The original folder of each upper folder, by number.
        limit_bytes: Most bytes that the upper folders may hold.
        kept: Whether the written files are kept after the trial.
    """

    rank: int
    name: str
    key: str
    listener: int
    spaces: tuple[int, ...]
    written: int
    folders: tuple[str, ...]
    limit_bytes: int
    kept: bool


def start(task: DaemonTask) -> None:
    """Start the daemon, detached: a script that waits for all its children must not see it."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()  # it survives a signal to the trial's process group, and ends by itself
        if os.fork() == 0:
            namespaces.name_process(DAEMON_NAME)
            _close_all_but(2, task.listener, *task.spaces, task.written)
            _run(task)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _close_all_but(*kept: int) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _run(task: DaemonTask) -> None:
    """Serve until the last process has ended, then report the written files."""
    fullest = _serve(task)
    number, size, copied = 0, 0, ("", 0)
    for name, about, existed in _files(task):
        number += 1
        size += about.st_size
        if existed and about.st_size > copied[1]:
            copied = (name, about.st_size)
    message = {
        "type": "files",
        "trial": task.name,
        "host": socket.gethostname(),
        "files": number,
        "bytes": size,
        "limit_bytes": task.limit_bytes,
        "full": int(not task.kept and fullest > task.limit_bytes - _FULL_BYTES),
        "copied": copied[0],
        "copied_bytes": copied[1],
    }
    with contextlib.suppress(OSError):  # the driver has closed the pipe
        write_message(2, task.key, task.rank, _NUMBER, message)
    if task.kept:
        _restore_paths(task)


def _serve(task: DaemonTask) -> int:
    """Send the namespace to ranks until all have ended; return the most bytes that were used."""
    listener = socket.socket(fileno=task.listener)
    fullest, ranks = 0, 0
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(_POLL_S):
                if key.fileobj is listener:
                    peer, _ = listener.accept()
                    if not namespaces.is_of_this_user(peer):
                        peer.close()
                        continue
                    with contextlib.suppress(OSError):  # the peer has ended
                        rights = array.array("i", task.spaces)
                        peer.sendmsg([b"0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                    selector.register(peer, selectors.EVENT_READ)
                    ranks += 1
                else:
                    selector.unregister(key.fileobj)
                    ranks -= 1
            space = os.fstatvfs(task.written)
            fullest = max(fullest, (space.f_blocks - space.f_bfree) * space.f_frsize)
            if not ranks:
                listener.close()
                return fullest


def _files(task: DaemonTask) -> Iterator[tuple[str, os.stat_result, bool]]:
    """Yield each written file: its path, its ``lstat``, and whether it existed before."""
    for number, folder in enumerate(task.folders):
        upper = f"/proc/self/fd/{task.written}/{LAYERS}/upper/{number}"
        for path, _, names in os.walk(upper):
            for name in names:
                file = os.path.join(path, name)
                about = os.lstat(file)
                if stat.S_ISREG(about.st_mode):
                    shown = os.path.join(folder, os.path.relpath(file, upper))
                    yield shown, about, _existed(file)


def _existed(file: str) -> bool:
    """Return whether the overlay has copied the file from its lower folder."""
    for name in ("user.overlay.origin", "trusted.overlay.origin"):
        with contextlib.suppress(OSError):
            os.getxattr(file, name)
            return True
    return False


def _restore_paths(task: DaemonTask) -> None:
    """Move the kept files to their original paths, below the folder that keeps them."""
    kept = Path(f"/proc/self/fd/{task.written}")
    for number, folder in enumerate(task.folders):
        _merge(kept / LAYERS / "upper" / str(number), kept / folder.lstrip("/"))
    shutil.rmtree(kept / LAYERS, ignore_errors=True)


def _merge(source: Path, target: Path) -> None:
    """Move the entries of ``source`` to ``target``, except the whiteouts of removed files."""
    for each in sorted(source.iterdir()):
        about = each.lstat()
        if stat.S_ISDIR(about.st_mode):
            _merge(each, target / each.name)
        elif not stat.S_ISCHR(about.st_mode) or about.st_rdev:
            target.mkdir(parents=True, exist_ok=True)
            each.rename(target / each.name)
