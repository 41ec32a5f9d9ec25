"""Signals: deferred during a block of code, and never lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import NoReturn

#: Exit status of a program that a signal ends; see :func:`exit_if_ending`.
_ending: int | None = None
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end the program by ``SystemExit``, with 128 plus their number."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        global _ending
        _ending = 128 + number
        raise SystemExit(_ending)

    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, end)


def exit_if_ending() -> None:
    """Raise ``SystemExit`` again after such a signal; called before and during jobs.

    Where the signal comes, the exception can be lost: in a destructor, or in an import of a library
    that catches everything.
    """
    if _ending is not None:
        raise SystemExit(_ending)


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
