"""Which layers are exchanged by factors."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
import torch
from torch import nn

from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.exchange.exchanges import Scaling
from hvd_autosync.runtime.exchange.factors import FactorsBucket, agree_linear
from hvd_autosync.runtime.patches.linear import watch_linear

RANKS = 2


def chosen(rows: tuple[int, int]) -> list[list[int]]:
    """The layers that each rank chooses, by number, after a batch of so many rows on each."""

    def body() -> list[int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 64))
        numbers = {model[0].weight: 0, model[2].weight: 1}
        layers = watch_linear(numbers)
        model(torch.randn(rows[rank()], 8)).sum().backward()
        found = agree_linear(list(model.parameters()), layers, "here")
        return [numbers[layer.weight] for layer in found if layer.weight is not None]

    return ThreadRanks(RANKS, seed=0).run(body)


def test_layers_whose_factors_pay_on_rank_0_are_chosen() -> None:
    """Of 8 x 16 up to 5 rows of each rank (5.3), of 16 x 64 up to 12 (12.8)."""
    assert chosen((5, 5)) == [[0, 1]] * RANKS
    assert chosen((6, 5)) == [[1]] * RANKS
    assert chosen((12, 1)) == [[1]] * RANKS
    assert chosen((13, 1)) == [[]] * RANKS
    assert chosen((1, 13)) == [[0, 1]] * RANKS


def test_a_weight_may_lie_anywhere_in_other_memory() -> None:
    """As a part of one vector of all parameters, behind an odd number of elements."""

    def checksum(offset: int) -> int:
        memory = torch.arange(60.0)
        with torch.no_grad():
            memory[offset : offset + 12] = torch.linspace(-1, 1, 12)
        weight = nn.Parameter(memory[offset : offset + 12].view(3, 4))
        bucket = FactorsBucket("w", watch_linear([weight])[weight], [weight], Scaling(), 0, RANKS)
        return bucket._checksum()

    assert checksum(1) == checksum(0) != 0
