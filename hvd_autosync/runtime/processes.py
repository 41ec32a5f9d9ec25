"""Ending this process so that nothing of it is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import psutil

#: Helpers that end by themselves once we are gone, and then remove what was left in shared memory
#: (multiprocessing's, torch's).
_CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
#: How long :func:`end_descendants` leaves them to it.
_CLEANERS_S = 2.0


def exit_with_children(status: int) -> NoReturn:
    """End the process at once, with every process that it started, such as data loaders."""
    try:
        _kill_children()
    finally:
        os._exit(status)


def end_descendants() -> None:
    """End every process below this one and wait until they are gone.

    For a subreaper (``prctl(2)``), below which even orphaned processes stay.
    """
    import psutil  # a dependency of Horovod

    patience_ends = time.monotonic() + _CLEANERS_S
    while children := psutil.Process().children(recursive=True):
        _kill(children, cleaners_too=time.monotonic() > patience_ends)
        for child in children:
            with contextlib.suppress(ChildProcessError):  # it is a child's child as yet
                os.waitpid(child.pid, os.WNOHANG)
        time.sleep(0.002)


def _kill_children() -> None:
    import psutil  # a dependency of Horovod; needed at the end only

    if threading.current_thread() is threading.main_thread():
        # A data loader's handler would raise here when its first worker dies.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _kill(psutil.Process().children(recursive=True), cleaners_too=False)


def _kill(processes: list[psutil.Process], *, cleaners_too: bool) -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            cleaner = any(name in word for word in process.cmdline() for name in _CLEANERS)
            if cleaners_too or not cleaner:
                process.kill()
