"""Cuts the batches of all ranks anew, so that ranks have as many samples of each as they should.

Torch's ``DistributedSampler`` gives rank r of n every n-th sample of an order that all ranks know,
from the r-th on. So batch k of all ranks, together, is a slice of that order, which can be cut at
other places. Ranks do so alike without a word between them, once they know where.
"""

from __future__ import annotations

import copy
import functools
import heapq
import math
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

#: Samples per second of each rank.
Speeds = tuple[float, ...]

#: Largest and smallest share, in equal ones: memory is made for one, and so are models that
#: normalize over their batch, which need two samples at least.
_LARGEST, _SMALLEST, _FEWEST = 2, 0.25, 2


@functools.lru_cache(maxsize=64)
def cut_sizes(samples: int, speeds: Speeds) -> tuple[int, ...]:
    """Samples for ranks of these speeds, so that the last of them is ready as soon as can be.

    No rank has more than twice its equal share, nor less than a quarter of it, nor a single sample
    unless its equal share is one.

    Args:
        samples: Of all ranks, at least one of each.
        speeds: Samples per second.
    """
    whole, rest = divmod(samples, len(speeds))
    if len(set(speeds)) == 1:
        return tuple(whole + (rank < rest) for rank in range(len(speeds)))
    most = _LARGEST * (whole + (rest > 0))
    least = min(whole, max(_FEWEST, math.ceil(_SMALLEST * whole)))
    found = [least] * len(speeds)
    ready = [((least + 1) / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(ready)
    for _ in range(samples - sum(found)):
        _, rank = heapq.heappop(ready)
        found[rank] += 1
        if found[rank] < most:
            heapq.heappush(ready, ((found[rank] + 1) / speeds[rank], rank))
    return tuple(found)


def can_be_cut(loader: Any, rank: int, ranks: int) -> bool:
    """Whether every rank can tell the batches of all."""
    sampler = loader.sampler
    return (
        type(sampler) is DistributedSampler
        and type(loader.batch_sampler) is BatchSampler
        and getattr(loader, "in_order", True)
        and (sampler.rank, sampler.num_replicas) == (rank, ranks)
    )


class Batches:
    """From where a loader's iterator has the indices of its batches, in place of its sampler's.

    Args:
        loader: The loader, which :func:`can_be_cut`.
        iterator: Its iterator, which has given no batch yet.
        rank: This rank.

    Attributes:
        begun: Batches that workers had before they could be cut.
        planned: The number of the next batch that is not with a worker or the script yet.
        used: Batches that steps have used.
        loader: The loader.
        speeds: By which batches are cut from batch ``cut_from`` on.
    """

    def __init__(self, loader: Any, iterator: Any, rank: int) -> None:
        self.begun = self.planned = int(getattr(iterator, "_send_idx", 0))
        self.used = 0
        self.loader = weakref.ref(loader)
        self._rank = rank
        self._sampler = copy.copy(loader.sampler)  # before the script tells it the next epoch
        self.speeds: Speeds = (1.0,) * self._sampler.num_replicas
        self.cut_from = 0
        self._earlier: list[tuple[int, Speeds]] = []
        self._batch_size: int = loader.batch_size
        self._original: Iterator[list[int]] = iterator._sampler_iter
        iterator._sampler_iter = self

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        batch = next(self._original)
        number, self.planned = self.planned, self.planned + 1
        sizes = self.sizes(number)
        if len(set(sizes)) > 1:
            begin = self._begin_of(number) + sum(sizes[: self._rank])
            batch = self._order[begin : begin + sizes[self._rank]]
        return batch

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be the same on all ranks."""
        own = self._sampler
        return (
            self._batch_size,
            own.total_size,
            len(own.dataset),
            own.seed,
            own.epoch,
            own.shuffle,
            own.drop_last,
        )

    @property
    def whole(self) -> int:
        """Samples of all ranks in a batch that is not the last."""
        return self._batch_size * len(self.speeds)

    def cut(self, first: int, speeds: Speeds) -> None:
        """Cut batches from number ``first`` on by these speeds."""
        self._earlier.insert(0, (self.cut_from, self.speeds))
        self.cut_from, self.speeds = first, speeds

    def sizes(self, number: int) -> tuple[int, ...]:
        """Every rank's samples of the batch of that number."""
        end = min(self._begin_of(number + 1), self._sampler.total_size)
        cuts = [(self.cut_from, self.speeds), *self._earlier]
        speeds = next(speeds for first, speeds in cuts if first <= number)
        return cut_sizes(end - self._begin_of(number), speeds)

    def weight(self, number: int) -> float:
        """Of the mean over this rank's part of the batch of that number."""
        sizes = self.sizes(number)
        return sizes[self._rank] * len(sizes) / sum(sizes)

    def use(self, given: int) -> int:
        """A step has used the batches up to that one; this rank's samples in them."""
        samples = sum(self.sizes(number)[self._rank] for number in range(self.used, given))
        self.used = given
        return samples

    def _begin_of(self, number: int) -> int:
        return number * self.whole

    @functools.cached_property
    def _order(self) -> list[int]:
        everybody = copy.copy(self._sampler)
        everybody.rank, everybody.num_replicas = 0, 1
        everybody.num_samples = everybody.total_size
        return list(everybody)
