"""Ends this process and all its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import psutil

#: Helpers that end by themselves after us, and then remove leftovers in shared memory
#: (multiprocessing's, torch's).
_CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
#: How long :func:`end_descendants` waits for them.
_CLEANERS_S = 2.0
#: Process name of the daemon that holds a trial's files (``launch/files_daemon.py``), and how long
#: :func:`await_daemons` waits for one.
DAEMON_NAME = "hvd-files"
_DAEMONS_S = 0.5


def exit_with_children(status: int) -> NoReturn:
    """End the process at once, with every process that it started, such as data loaders."""
    try:
        _kill_children()
    finally:
        os._exit(status)


def end_descendants() -> None:
    """End every process below this one and wait until all are gone.

    For a subreaper (``prctl(2)``), below which even orphaned processes remain.
    """
    deadline = time.monotonic() + _CLEANERS_S
    while children := [each for each in _below() if not _is_daemon(each)]:
        _kill(children, cleaners_too=time.monotonic() > deadline)
        for child in children:
            with contextlib.suppress(ChildProcessError):  # it is still a grandchild
                os.waitpid(child.pid, os.WNOHANG)
        time.sleep(0.002)


def await_daemons() -> None:
    """Wait briefly until the daemons that hold a trial's files end by themselves.

    They are descendants of this process. They end after the trial's last process on this host, and
    send the last message.
    """
    deadline = time.monotonic() + _DAEMONS_S
    while (daemons := [each for each in _below() if _is_daemon(each)]) and (
        time.monotonic() < deadline
    ):
        for each in daemons:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(each.pid, os.WNOHANG)
        time.sleep(0.002)


def _below() -> list[psutil.Process]:
    import psutil

    return psutil.Process().children(recursive=True)


def _is_daemon(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.name() == DAEMON_NAME
    except psutil.Error:  # it is gone
        return False


def _kill_children() -> None:
    import psutil  # a dependency of Horovod, needed at the end only

    if threading.current_thread() is threading.main_thread():
        # A data loader's SIGCHLD handler would raise here when its first worker dies.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _kill(psutil.Process().children(recursive=True), cleaners_too=False)


def _kill(processes: list[psutil.Process], *, cleaners_too: bool) -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            cleaner = any(name in word for word in process.cmdline() for name in _CLEANERS)
            if cleaners_too or not cleaner:
                process.kill()
