"""Ends a process that would wait inside a library for ever.

Python calls handlers of signals, and raises exceptions, in the main thread only, once it is back
from the library. A thread of ours measures the time, and learns of signals by the descriptor that
the part of Python's handler in C writes to at once (``signal.set_wakeup_fd``).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

#: Seconds after SIGTERM until the process ends, without and with a handler of the script's, which
#: cannot run before. Launchers send SIGKILL afterwards: Open MPI's after one second, Horovod's
#: after five.
_AFTER_SIGTERM_S, _WITH_HANDLER_S = 0.5, 3.0
_DONE = b"\0"  # no signal has this number


@contextlib.contextmanager
def time_limit(limit_s: float, end: Callable[[bool], object]) -> Iterator[None]:
    """Call ``end`` in a thread if the context stays open for too long. Main thread only.

    SIGTERM shortens the time, and has its effect when the context is left.

    Args:
        limit_s: Longest time, in seconds.
        end: Ends the process; its argument is whether SIGTERM came.

    Raises:
        RuntimeError: The thread cannot start; nothing of the context is left.
    """
    received, written = os.pipe()
    os.set_blocking(written, False)
    before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    terminated = threading.Event()
    unhandled = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if unhandled:
        signal.signal(signal.SIGTERM, lambda *_: terminated.set())

    def watch() -> None:
        deadline = time.monotonic() + limit_s
        while select.select([received], [], [], max(deadline - time.monotonic(), 0.0))[0]:
            numbers = os.read(received, 512)
            if before >= 0:  # whoever reads it, such as a loop of asyncio
                with contextlib.suppress(OSError):
                    os.write(before, numbers.replace(_DONE, b""))
            if signal.SIGTERM in numbers:
                terminated.set()
                left_s = _AFTER_SIGTERM_S if unhandled else _WITH_HANDLER_S
                deadline = min(deadline, time.monotonic() + left_s)
            if _DONE in numbers:
                return
        end(terminated.is_set())

    watching = threading.Thread(target=watch, name="hvd_autosync time limit", daemon=True)
    try:
        watching.start()
        yield
    finally:
        signal.set_wakeup_fd(before)
        if watching.ident is not None:  # it could be started
            os.write(written, _DONE)
            watching.join()
        os.close(received)
        os.close(written)
        if unhandled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if terminated.is_set():
                signal.raise_signal(signal.SIGTERM)
