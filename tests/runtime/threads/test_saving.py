"""Checkpoints that one of several ranks in threads saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.collectives.operations import Sum, allreduce, collectives, rank, using
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.patches.epochs import SyncPoint
from hvd_autosync.runtime.state import rank_states
from hvd_autosync.runtime.sync.phase import Phase, Votes
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.sync_plan import SyncPlan

_SHAPES = [(4, 3), (5,), (2, 8)]
_CODED = ExchangePlan(1, rest=ClassPlan(codec="topk", ratio=0.1))


class ShutDown:
    """The collectives of a rank that has shut Horovod down: every function of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError("Horovod has not been initialized; use hvd.init().")


@pytest.mark.parametrize(
    "plan",
    [
        SyncPlan(_CODED),
        SyncPlan(_CODED, schedule=Schedule(4)),
        SyncPlan(protocol=Protocol("asp")),
        SyncPlan(schedule=Schedule(4), protocol=Protocol("asp", share=0.5, total=1000)),
    ],
    ids=["codec", "local steps", "protocol", "both"],
)
def test_a_script_may_save_after_the_shutdown(
    plan: SyncPlan, begin: Any, loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Horovod's optimizer, which needs nothing of Horovod for it."""
    monkeypatch.setattr(Votes, "EVERY", 2)

    def body() -> None:
        own = begin(_SHAPES, plan, momentum=0.5)
        epochs = getattr(own.sync._progress, "epochs", None)
        for number in range(10) if epochs is None else loader(epochs, 10):
            own.step({p: torch.full(s, rank() + number + 1.0) for p, s in enumerate(_SHAPES)})
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        wanted = own.sync.state_dict(), own.method.whole_states()
        if rank() == 0:
            ended: Any = ShutDown()
            with using(ended):
                found = own.sync.state_dict(), own.method.whole_states()
            assert str(found) == str(wanted)

    ThreadRanks(2).run(body)


def apart(begin: Any, phase: Phase) -> Any:
    """A training whose ranks have states of their own."""
    own = begin(_SHAPES, SyncPlan(schedule=Schedule(4)), momentum=0.5)
    own.sync.at_sync_point(SyncPoint.SCRIPT)
    while not own.method.running:
        step(own)
    step(own)
    if phase is Phase.RESTORED:
        saved = own.sync.state_dict()
        own = begin(_SHAPES, SyncPlan(schedule=Schedule(4)), momentum=0.5)
        own.sync.load_state_dict(saved)
    assert own.sync._phase.now is phase
    return own


def step(own: Any) -> None:
    own.step({place: torch.full(shape, rank() + 1.0) for place, shape in enumerate(_SHAPES)})


def pause(ready: Callable[[], object]) -> None:
    """Let the other rank run until it is so far, or has failed."""
    own: Any = collectives()
    while not (ready() or own.ranks.failure):
        own.pass_turn()


@pytest.mark.parametrize("phase", [Phase.ROUNDS, Phase.RESTORED])
def test_no_rank_saves_states_that_another_is_stepping(
    phase: Phase, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the step does not end; a closure's operation may wait for the rank that saves."""
    monkeypatch.setattr(rank_states, "_LONGEST_STEP_S", 0.01)
    stepping, asked = [], []

    def body() -> None:
        own = apart(begin, phase)
        if rank() == 1:

            def half_a_step() -> None:
                stepping.append(True)
                pause(lambda: asked)

            own.method.run_step(half_a_step)
        else:
            pause(lambda: stepping)
            with pytest.raises(AutosyncError, match=r"it has been in optimizer.step\(\)"):
                own.sync.state_dict()
            asked.append(True)
        allreduce(torch.ones(1), name="no rank is in its step", op=Sum)
        assert len(own.sync.state_dict()["hvd_autosync_rounds"]["ranks"]) == 2

    ThreadRanks(2).run(body)


@pytest.mark.parametrize("phase", [Phase.ROUNDS, Phase.RESTORED])
def test_ranks_may_save_in_hooks_of_their_steps(
    phase: Phase, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_states, "_LONGEST_STEP_S", 3.0)

    def body() -> int:
        own = apart(begin, phase)

        def hook() -> Any:
            allreduce(torch.ones(1), name="all ranks are in their steps", op=Sum)
            return own.sync.state_dict()

        return len(own.method.run_step(hook)["hvd_autosync_rounds"]["ranks"])

    assert ThreadRanks(2, turns=False).run(body) == [2, 2]


def test_a_rank_saves_while_another_waits_for_its_gradients(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_states, "_LONGEST_STEP_S", 0.01)
    sent: list[bool] = []

    def body() -> None:
        own = apart(begin, Phase.RESTORED)
        if rank() == 1:
            on_synchronize = own.method.inner.on_synchronize

            def synchronize(**how: bool) -> None:
                sent.append(True)
                on_synchronize(**how)

            monkeypatch.setattr(own.method.inner, "on_synchronize", synchronize)
        else:
            pause(lambda: sent)
            own.sync.state_dict()
        step(own)

    ThreadRanks(2).run(body)
