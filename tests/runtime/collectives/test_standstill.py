"""Signals that wait while Horovod is initialized again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.runtime.collectives.standstill import signals_wait


@pytest.fixture
def handled() -> Iterator[list[int]]:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_is_handled_once_the_context_is_left(handled: list[int]) -> None:
    with signals_wait():
        signal.raise_signal(signal.SIGUSR1)
        assert not handled
    assert handled == [signal.SIGUSR1]


def test_all_signals_are_listed_once_and_not_at_each_boundary(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list takes 0.1 ms and more, as long as the rest."""
    listed: list[int] = []
    monkeypatch.setattr(signal, "valid_signals", lambda: listed.append(1) or {signal.SIGUSR1})
    with signals_wait():
        signal.raise_signal(signal.SIGUSR1)
        assert not handled
    assert handled == [signal.SIGUSR1] and not listed


def test_a_handler_that_raises_keeps_no_other_signal_from_being_handled(handled: list[int]) -> None:
    def fail(number: int, frame: FrameType | None) -> None:
        raise RuntimeError("handled")

    before = signal.signal(signal.SIGUSR2, fail)
    try:
        with pytest.raises(RuntimeError, match="handled"), signals_wait():
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert handled == [signal.SIGUSR1]


def test_in_another_thread_nothing_waits_and_nothing_fails(handled: list[int]) -> None:
    """Its rank then tells the others that it refuses, instead of leaving them to wait."""
    inside: list[list[int]] = []

    def body() -> None:
        with signals_wait():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            entered.set()
            handled_in_main.wait(120)
            inside.append([*handled])

    entered, handled_in_main = threading.Event(), threading.Event()
    thread = threading.Thread(target=body)
    thread.start()
    assert entered.wait(120)
    handled_in_main.set()
    thread.join()
    assert inside == [[signal.SIGUSR1]]
