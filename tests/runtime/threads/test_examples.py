"""The examples of an exchange and a codec run on any ranks, also on those of one process."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_autosync import extensions
from hvd_autosync.runtime.collectives.operations import all_ranks, rank, size, synchronize
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.exchange.exchanges import Scaling, Steps
from hvd_autosync.search_space.exchange_plan import ClassPlan

EXAMPLES = Path(__file__).parents[3] / "examples" / "extending"


def run(steps: Steps) -> None:
    """Wait for each operation when it is started."""
    handle = next(steps)
    while True:
        try:
            handle = steps.send(synchronize(handle))
        except StopIteration:
            return


def test_the_examples_reduce_over_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    for name in ("add_exchange", "add_codec"):
        monkeypatch.setattr(extensions, name, lambda name, make, **_: made.update({name: make}))
    for file in ("gather_exchange.py", "sign_codec.py"):
        runpy.run_path(str(EXAMPLES / file))

    def body() -> list[list[float]]:
        own = torch.tensor([1.0, -1.0, 1.0]) * (rank() + 1)
        run(made["gather"](3, own, Scaling(0.5, 2.0))(own, "gather"))
        coded = torch.tensor([2.0, -2.0, 2.0])
        codec = made["sign"](ClassPlan(codec="sign"), 3, coded, size())
        run(codec(coded, "sign", Scaling(), all_ranks()))
        return [own.tolist(), coded.tolist()]

    assert ThreadRanks(3, seed=1).run(body) == [[[6.0, -6.0, 6.0]] * 2] * 3
