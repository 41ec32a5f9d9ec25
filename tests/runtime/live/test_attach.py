"""Strategies that a running training does not have the memory for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvd_autosync.errors import SpaceError
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.live import attach
from hvd_autosync.search_space import Strategy, Value

CLASSES = {"large": ("weight",)}


@pytest.mark.parametrize(
    ("plan", "copies"),
    [
        ({"large_lossless": True}, 4),
        ({"large_exchange": "factors", "large_lossless": True}, 4),
        ({"large_exchange": "factors"}, 3),
        ({"large_exchange": "hierarchical_factors"}, 5),
        ({"large_exchange": "hierarchical_factors", "large_lossless": True}, 6),
        ({"large_exchange": "sharded"}, 2.5),
        ({"buckets": 2}, 2),
        ({}, 0),
    ],
)
def test_a_strategy_needs_memory_for_its_exchanges(
    monkeypatch: pytest.MonkeyPatch, plan: dict[str, Value], copies: float
) -> None:
    """Codes of both ranks, beside what they are made of and become."""
    weight = torch.nn.Parameter(torch.zeros(256, 1024))
    optimizer = SimpleNamespace(_requires_update={weight})
    monkeypatch.setattr(attach, "switch", lambda optimizer, plan: None)

    def attached(free: float) -> None:
        monkeypatch.setattr(attach, "free_bytes", lambda device: free * weight.numel() * 4)
        strategy = Strategy(plan)
        ThreadRanks(2, seed=0).run(lambda: attach.Attacher().attach([optimizer], strategy, CLASSES))

    attached(copies + 0.2)
    if copies:
        with pytest.raises(SpaceError):
            attached(copies - 0.3)
