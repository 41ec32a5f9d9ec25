"""Checkpoints that one of several ranks in threads saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvd_autosync.runtime.collectives.operations import rank, using
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.patches.epochs import SyncPoint
from hvd_autosync.runtime.sync.phase import Votes
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
