"""Signals that must wait, and signals that must not be lost."""

import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from hvd_autosync.launch import signals
from hvd_autosync.launch.signals import (
    go_on,
    signals_deferred,
    stop,
    stop_if_asked,
    stop_on_signals,
)


@pytest.fixture
def counted() -> Iterator[list[int]]:
    """Numbers of the signals that were handled; each raises as Ctrl-C does."""
    seen: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, take)
    yield seen
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("times", [1, 2])
def test_each_of_several_counts_after_the_block(counted: list[int], times: int) -> None:
    """Two presses of Ctrl-C mean something else than one."""
    done = False
    with pytest.raises(KeyboardInterrupt), signals_deferred():
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        assert counted == []
        done = True
    assert done and counted == [signal.SIGINT] * times


def test_a_handler_that_python_has_not_set_stays(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a program that embeds Python, which could not be set again."""
    usual = signal.getsignal
    monkeypatch.setattr(
        signal, "getsignal", lambda each: None if each == signal.SIGHUP else usual(each)
    )
    before = usual(signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt), signals_deferred():
        assert usual(signal.SIGHUP) is before
        os.kill(os.getpid(), signal.SIGINT)
    assert counted == [signal.SIGINT]


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGTERM and SIGHUP end the program, until the test is over."""
    # nohup lets SIGHUP be ignored.
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(signals, "_asked", None)
    stop_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("ending")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_in_a_destructor_ends_the_program(number: signal.Signals) -> None:
    class Dropped:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)
            signal.getsignal(number)  # where Python handles it

    stop_if_asked()
    del (dropped := [Dropped()])[0]
    assert dropped == []
    with pytest.raises(SystemExit) as ended:
        stop_if_asked()
    assert ended.value.code == 128 + number


@pytest.mark.usefixtures("ending")
def test_a_signal_ends_the_program_at_once() -> None:
    with pytest.raises(SystemExit, match="143"):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("ending")
def test_a_stop_that_had_its_effect_is_forgotten() -> None:
    with pytest.raises(KeyboardInterrupt):
        stop(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        stop_if_asked()
    go_on()
    stop_if_asked()
