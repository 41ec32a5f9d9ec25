"""A small process that holds the files of a trial on one host for its ranks.

It hands the namespace to ranks that ask for it, and ends when the last process of the trial is
gone; then it tells the driver what was written. Between these it sleeps.
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
from hvd_autosync.runtime.driver.processes import DAEMON_NAME
from hvd_autosync.runtime.driver.wire import encode_message

#: Number of its message: ranks count from 0.
_NUMBER = 2 * 10**8
#: How often it looks how full the place for written files is.
_LOOK_S = 0.5
#: What is left when a file did not fit.
_FULL_BYTES = 1 << 20


@dataclass(frozen=True)
class DaemonTask:
    """What a keeper is to keep.

    Attributes:
        rank: In whose name it speaks.
        name: Of the trial's run.
        key: Of the trial's messages.
        listener: Descriptor of the socket at which ranks ask.
        spaces: Descriptors of the mount namespace and, where there is one, of the user namespace.
        written: Descriptor of the folder of upper folders.
        folders: Of what these are, by number.
        limit_bytes: Most that they may hold.
        kept: Whether they stay.
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
    """Start the keeper, as nobody's child: a script may wait for its own."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()  # what ends the trial's processes by their group leaves it to end by itself
        if os.fork() == 0:
            namespaces.name_process(DAEMON_NAME)
            _close_all_but(2, task.listener, *task.spaces, task.written)
            _keep(task)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _close_all_but(*kept: int) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _keep(task: DaemonTask) -> None:
    """Keep until nobody is left, then tell."""
    fullest = _serve(task)
    number, size, copied = 0, 0, ("", 0)
    for name, about, was_there in _files(task):
        number += 1
        size += about.st_size
        if was_there and about.st_size > copied[1]:
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
    for line in filter(None, encode_message(task.key, task.rank, _NUMBER, message).split(b"\n")):
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(2, b"\n" + line + b"\n")
    if task.kept:
        _put_in_place(task)


def _serve(task: DaemonTask) -> int:
    """Hand out the namespace until all who have it are gone; the most bytes that were used."""
    listener = socket.socket(fileno=task.listener)
    fullest, ranks = 0, 0
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(_LOOK_S):
                if key.fileobj is listener:
                    peer, _ = listener.accept()
                    if not namespaces.is_of_this_user(peer):
                        peer.close()
                        continue
                    with contextlib.suppress(OSError):  # it is the first one, or gone
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
    """Each file that was written: its path, what it is, and whether it was there before."""
    for number, folder in enumerate(task.folders):
        upper = f"/proc/self/fd/{task.written}/upper/{number}"
        for path, _, names in os.walk(upper):
            for name in names:
                file = os.path.join(path, name)
                about = os.lstat(file)
                if stat.S_ISREG(about.st_mode):
                    shown = os.path.join(folder, os.path.relpath(file, upper))
                    yield shown, about, _was_there(file)


def _was_there(file: str) -> bool:
    """Whether an overlay has copied it from below."""
    for name in ("user.overlay.origin", "trusted.overlay.origin"):
        with contextlib.suppress(OSError):
            os.getxattr(file, name)
            return True
    return False


def _put_in_place(task: DaemonTask) -> None:
    """Give what is kept the names that it had, below the folder that keeps it."""
    kept = Path(f"/proc/self/fd/{task.written}")
    for number, folder in enumerate(task.folders):
        _merge(kept / "upper" / str(number), kept / folder.lstrip("/"))
    for name in ("upper", "work"):
        shutil.rmtree(kept / name, ignore_errors=True)


def _merge(source: Path, target: Path) -> None:
    """Move what is in ``source`` to ``target``; marks of removed files are left out."""
    for each in sorted(source.iterdir()):
        about = each.lstat()
        if stat.S_ISDIR(about.st_mode):
            _merge(each, target / each.name)
        elif not stat.S_ISCHR(about.st_mode) or about.st_rdev:
            target.mkdir(parents=True, exist_ok=True)
            each.rename(target / each.name)
