"""A model with a table, a matrix and vectors, and data that it can learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

_ROWS, _WIDTH, _HIDDEN = 64, 16, 32


class Model(nn.Module):
    """One parameter or more of each class that strategies tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(_ROWS, _WIDTH)
        self.hidden = nn.Linear(_WIDTH, _HIDDEN)
        self.normalized = nn.LayerNorm(_HIDDEN)
        self.out = nn.Linear(_HIDDEN, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean squared error of a batch of rows' numbers and targets."""
        indices, targets = batch
        hidden = self.normalized(torch.relu(self.hidden(self.table(indices).mean(1))))
        return nn.functional.mse_loss(self.out(hidden).squeeze(1), targets)


class Data(Dataset[list[Tensor]]):
    """Pairs of rows, and a noisy function of them; gives whole batches, which is cheap.

    Args:
        samples: How many.
        rank: Each has its own.
    """

    def __init__(self, samples: int, rank: int) -> None:
        dice = torch.Generator().manual_seed(rank)
        self._indices = torch.randint(_ROWS, (samples, 2), generator=dice)
        noise = torch.randn(samples, generator=dice)
        self._targets = torch.sin(self._indices.float()).sum(1) + 0.5 * noise

    def __len__(self) -> int:
        return len(self._targets)

    def __getitems__(self, places: list[int]) -> list[Tensor]:
        return [self._indices[places], self._targets[places]]


def as_it_is(batch: list[Tensor]) -> list[Tensor]:
    """A batch of :class:`Data` needs no collation."""
    return batch
