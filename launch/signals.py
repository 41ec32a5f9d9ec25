"""Signals: deferred during a block of code, and never lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import NoReturn

#: The exception by which a signal has stopped the program; see :func:`stop_if_asked`.
_asked: BaseException | None = None
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_on_signals() -> None:
    """Let SIGTERM and SIGHUP stop the program by ``SystemExit``, with 128 plus their number."""

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        stop(SystemExit(128 + number))

    signal.signal(signal.SIGTERM, handle)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, handle)


def stop(error: BaseException) -> NoReturn:
    """Raise ``error`` in a signal's handler, and again in :func:`stop_if_asked`."""
    global _asked
    _asked = error
    raise error


def stop_if_asked() -> None:
    """Raise again what :func:`stop` has raised; called before and during jobs.

    Where a signal comes, the exception can be lost: in a destructor, or in an import of a library
    that catches everything.
    """
    if _asked is not None:
        raise _asked


def go_on() -> None:
    """Forget what :func:`stop` has raised, because it had its effect."""
    global _asked
    _asked = None


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

    # One that Python has not set, as of a program that embeds it, could not be set again.
    ours = [each for each in _STOPPING if signal.getsignal(each) is not None]
    before = {each: signal.signal(each, note) for each in ours}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        with ExitStack() as stack:  # deliver all, even if the first one raises
            for number in reversed(arrived):
                stack.callback(os.kill, os.getpid(), number)
