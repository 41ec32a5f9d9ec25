"""Holds a process still for a moment: other threads, and signals.

Nothing is patched outside of that moment, so it costs nothing.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from horovod.torch import mpi_ops

from hvd_autosync.util import patches
from hvd_autosync.util.amounts import amount, be

#: The modules whose functions call Horovod's libraries.
_HOROVODS = (mpi_ops.__name__, "horovod.common.basics")
#: The numbers of all signals, which never change: to list them takes 0.1 to 0.2 ms.
_SIGNALS = tuple(map(int, signal.valid_signals()))


class _Gate:
    """Stands in for a library of Horovod: other threads than this one wait at each use.

    Args:
        library: The library.
        opened: Set once they may go on.
    """

    def __init__(self, library: Any, opened: threading.Event) -> None:
        owner = threading.get_ident()

        def enter(name: str) -> Any:
            if threading.get_ident() != owner:
                opened.wait()
            return getattr(library, name)

        self.__dict__["enter"] = enter

    def __getattr__(self, name: str) -> Any:
        return self.enter(name)


@contextlib.contextmanager
def others_wait() -> Iterator[None]:
    """Let calls of Horovod wait that other threads make while the context is open."""
    opened = threading.Event()
    patches.install("standstill", lambda library: _Gate(library, opened))
    try:
        yield
    finally:
        patches.uninstall("standstill")
        opened.set()


def in_flight() -> str:
    """Return what of Horovod is under way in this process; empty: nothing.

    Call it while :func:`others_wait`.
    """
    if mpi_ops._handle_map:
        count = len(mpi_ops._handle_map)
        return f"{amount(count, 'operation')} {be(count)} under way"
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.ident != threading.get_ident() and _is_inside(frames.get(thread.ident or 0)):
            return f"thread {thread.name!r} is inside a call of Horovod"
    return ""


def _is_inside(frame: FrameType | None) -> bool:
    """Return whether a thread of this frame is in Horovod's code, and not waiting at the gate."""
    while frame is not None:
        if frame.f_code is _Gate.__getattr__.__code__:
            return False
        if frame.f_globals.get("__name__") in _HOROVODS:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Let signals wait that Python handles, and handle them when the context is left.

    A handler that raises an exception, or ends the process, would otherwise leave Horovod half
    initialized, and the other ranks waiting. Python handles signals in the main thread only: in
    another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers = {
        number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))
    }
    with contextlib.ExitStack() as stack:  # all of this, also if a handler raises an exception
        stack.callback(_raise_all, received)
        for number, handler in handlers.items():
            stack.callback(signal.signal, number, handler)
            signal.signal(number, lambda number, _: received.append(number))
        yield


def _raise_all(signals: list[int]) -> None:
    """Let the handlers of signals run, each of them, in order."""
    with contextlib.ExitStack() as stack:
        for each in reversed(signals):
            stack.callback(signal.raise_signal, each)
