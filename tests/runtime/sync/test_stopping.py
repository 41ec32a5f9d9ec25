"""Which steps without a barrier a rank reports to rank 0, and after which it stops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.stragglers.policy import StragglerPolicy
from hvd_autosync.runtime.sync.stopping import Stopping


def test_the_step_after_which_a_rank_stops_is_reported_too() -> None:
    reports: list[tuple[int, float]] = []
    guard: Any = SimpleNamespace(watches=True, loss=lambda: 2.5)
    asynchronous: Any = SimpleNamespace(
        segment=1,
        clock=0,
        send=lambda to, message: reports.append((message["clock"], message["loss"])),
    )
    (own,) = ThreadRanks(1).run(lambda: Stopping(guard, StragglerPolicy("none", 2)))
    own.on_message(asynchronous, 0, {"kind": "stop", "segment": 1, "clock": 2})
    stops = []
    for asynchronous.clock in (1, 2):
        stops.append(own.stepped(asynchronous, 0.1))
    assert stops == [False, True]
    assert reports == [(1, 2.5), (2, 2.5)]
