"""Losses are the scalars whose ``backward()`` is called."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hvd_autosync.runtime.measure.losses import Losses
from hvd_autosync.runtime.patches import backward
from hvd_autosync.util import patches


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Losses]:
    monkeypatch.setattr(backward, "_losses", None)
    losses = Losses()
    backward.watch_backward(losses)
    yield losses
    patches.uninstall("losses")


def test_losses_of_a_skipped_step_are_no_part_of_the_next(losses: Losses) -> None:
    """A gradient scaler skips the first one, which overflows."""
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), torch.amp.GradScaler("cpu")
    for factors in ((1.0, torch.inf), (2.0, 3.0)):
        optimizer.zero_grad()
        for factor in factors:
            scaler.scale(weight * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert weight.item() == 1.0 - 0.5 * 5.0
    kept = losses.end_step(0)[0]
    assert kept is not None and float(kept) == 5.0


def test_the_outer_of_two_backward_passes_is_timed(losses: Losses) -> None:
    """Reentrant checkpointing runs another one inside."""
    said: list[str] = []
    profiler: Any = SimpleNamespace(
        backward_begins=lambda: said.append("begins"), backward_ends=lambda: said.append("ends")
    )
    backward.watch_backward(losses, lambda: profiler)
    x = torch.ones(2, requires_grad=True)
    checkpoint(lambda y: 3 * y, x * 1.0, use_reentrant=True).sum().backward()
    assert said == ["begins", "ends"]


def test_only_scalars_are_losses(losses: Losses) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    (weight * 2).backward(torch.ones(2))
    assert losses.end_step(0)[0] is None
    weight.sum().backward()
    kept = losses.end_step(0)[0]
    assert kept is not None and float(kept) == 2.0
