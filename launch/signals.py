"""Signals that are deferred during a block of code."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer SIGINT, SIGTERM and SIGHUP to the end of the block.

    Blocking them is not enough: the kernel gives a signal to any thread that does not block it, and
    Python then handles it in the main thread. Other threads defer nothing, because Python
    handles no signals there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {each: signal.signal(each, note) for each in _STOPPING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        with ExitStack() as stack:  # deliver all, even if the first one raises
            for number in reversed(arrived):
                stack.callback(os.kill, os.getpid(), number)
