"""Signals that must wait."""

import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from hvd_autosync.launch.signals import signals_deferred


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
