"""The guard, where other ranks are gone before it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_autosync.runtime.guard import guard
from hvd_autosync.runtime.measure.losses import Losses
from hvd_autosync.search_space.trial import LOSS_WINDOW, LossPrediction


def test_ranks_that_end_their_script_first_do_not_break_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for a window's sum: the last one may be sent when some rank has exited."""

    def gone(*_: Any, **__: Any) -> None:
        raise HorovodInternalError("Horovod has been shut down.")

    monkeypatch.setattr(guard, "allreduce_async_", gone)
    guarded, losses = guard.Guard("test"), Losses()
    for _ in range(3 * LOSS_WINDOW):
        losses.seen(torch.tensor(1.0))
        assert guarded.stepped(losses)


class SeenLock:
    """A lock that says when a thread begins to wait for it.

    Args:
        waited: Set then.
    """

    def __init__(self, waited: threading.Event) -> None:
        self._lock, self._waited = threading.Lock(), waited

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waited.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize(
    "change",
    [
        lambda guarded: guarded.on_quiescent(99, waiting=True),
        lambda guarded: guarded.on_quiescent(99, waiting=False),
        lambda guarded: guarded.forget_prediction(),
    ],
    ids=["the end of a phase", "ranks that meet", "another optimizer"],
)
def test_nothing_changes_while_the_thread_of_messages_tests_a_loss(
    change: Callable[[guard.Guard], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "size", lambda: 1)
    monkeypatch.setattr(guard, "gather_texts", lambda text, name: [text])
    guarded = guard.Guard("test", LossPrediction((1.0,), (0.1,)))
    #: The other thread has changed the guard, or waits until it may.
    came = threading.Event()
    guarded._lock = SeenLock(came)  # type: ignore[assignment]

    def state() -> list[object]:
        predicted = guarded._envelope._prediction
        return [guarded.step, guarded._loose_windows, guarded._envelope, predicted]

    def change_it() -> None:
        try:
            change(guarded)
        finally:
            came.set()

    other, accepts, seen = threading.Thread(target=change_it), guarded._envelope.accepts, []

    def watched(mean: float, window: int) -> str:
        before = state()
        other.start()
        came.wait()
        seen.append(state() == before)
        return accepts(mean, window)

    monkeypatch.setattr(guarded._envelope, "accepts", watched)
    for _ in range(LOSS_WINDOW):
        assert guarded.accepts_one(1.0)
    other.join()
    assert seen == [True]
    assert guarded.step == 99 or guarded.predicted_steps == 0, "the change was made afterwards"


@pytest.mark.parametrize("late", [False, True])
def test_a_loss_is_an_averages_also_if_it_is_reported_after_the_step(late: bool) -> None:
    guarded, losses = guard.Guard("test"), Losses()
    for step in range(10):  # parameters after every fourth step are an average
        losses.seen(torch.tensor(9.0))
        own = torch.tensor(float(step % 4 == 0))
        if not late:
            losses.report(own)
        guarded.stepped(losses, average=step % 4 == 3)
        if late:
            losses.report(own)
        if late and step == 0:
            guarded._of_averages.taken()  # what was seen before the first report
    total, count = guarded._of_averages.taken()
    assert total == count == 3


def test_without_a_barrier_several_losses_may_rise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "size", lambda: 1)
    monkeypatch.setattr(guard, "gather_texts", lambda text, name: [text])
    guarded = guard.Guard("test", LossPrediction((1.0,), (0.1,)))
    rising = [float(step) for step in range(20 * LOSS_WINDOW)]
    assert all(guarded.accepts_one(loss, several=True) for loss in rising)
    assert not guarded.accepts_one(float("nan"), several=True)
    assert not all(guarded.accepts_one(loss) for loss in rising)


def test_a_window_that_ends_after_a_rejection_keeps_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a barrier losses arrive until the ranks stop, and the reason is asked for then."""
    monkeypatch.setattr(guard, "size", lambda: 2)
    guarded = guard.Guard("test")
    for _ in range(2 * LOSS_WINDOW - 1):
        assert guarded.accepts_one(1.0)
    assert not guarded.accepts_one(float("nan"))
    assert not guarded.accepts_one(1.0), "which ends the window"
    assert "not finite" in guarded.verdict
