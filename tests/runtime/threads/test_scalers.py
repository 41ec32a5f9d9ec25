"""Gradient scalers of ranks in threads, under error feedback."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.sync_plan import SyncPlan

_SHAPES = [(8,), (16, 16)]
_USABLE = 1024.0
_RATE = 0.5


@pytest.mark.parametrize("codec", ["topk", "powersgd"])
def test_error_feedback_keeps_nothing_of_skipped_steps(codec: str, begin: Any) -> None:
    """Another bucket overflows, until the scale has come down; then comes the first update."""

    def body() -> float:
        own = begin(_SHAPES, _compressed(codec))
        scaler = torch.amp.GradScaler("cpu", init_scale=64 * _USABLE)
        for skipped in range(6):
            assert not own.scaled_step(scaler, [torch.full((8,), torch.inf), _gradient(skipped)])
        assert own.scaled_step(scaler, [torch.ones(8), _gradient(6)])
        assert scaler.get_scale() == _USABLE
        return float((own.values()[1] - 1).norm())

    moved, _ = ThreadRanks(2).run(body)
    assert 0 < moved < _RATE * float(_gradient(6).norm())


@pytest.mark.parametrize("codec", ["topk", "powersgd"])
def test_error_feedback_follows_the_loss_scale(codec: str, begin: Any) -> None:
    """Powers of two are exact, so a scale that grows changes no bit."""

    def body(growth_interval: int) -> list[torch.Tensor]:
        own = begin(_SHAPES, _compressed(codec))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=growth_interval)
        for step in range(10):
            assert own.scaled_step(scaler, [torch.ones(8), _gradient(step)])
        assert scaler.get_scale() == (4.0 if growth_interval > 10 else 4.0 * 2**5)
        return own.values()

    (grown, _), (constant, _) = (
        ThreadRanks(2).run(lambda each=each: body(each)) for each in (2, 100)
    )
    exact = torch.equal if codec == "topk" else torch.allclose
    assert all(map(exact, grown, constant))


def _compressed(codec: str) -> SyncPlan:
    large = ClassPlan(codec=codec, ratio=0.1, rank=1)
    return SyncPlan(ExchangePlan(large=large), {"large": ("p1",)})


def _gradient(step: int) -> torch.Tensor:
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
