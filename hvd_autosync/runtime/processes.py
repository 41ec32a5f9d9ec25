"""Ending this process so that nothing of it is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import NoReturn

#: Helpers that end by themselves once we are gone, and then remove what was left in shared memory
#: (multiprocessing's, torch's).
_CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")


def exit_with_children(status: int) -> NoReturn:
    """End the process at once, with every process that it started, such as data loaders."""
    try:
        _kill_children()
    finally:
        os._exit(status)


def _kill_children() -> None:
    import psutil  # a dependency of Horovod; needed at the end only

    if threading.current_thread() is threading.main_thread():
        # A data loader's handler would raise here when its first worker dies.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if not any(name in word for word in child.cmdline() for name in _CLEANERS):
                child.kill()
