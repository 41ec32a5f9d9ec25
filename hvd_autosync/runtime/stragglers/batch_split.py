"""Batch split: divides each batch of all ranks by the ranks' speeds.

Torch's ``DistributedSampler`` gives rank r of n every n-th sample of an order that all ranks know,
from the r-th on. So batch k of all ranks together is a slice of that order, which can be split at
other positions. Once ranks know the positions, they do so without communication.
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

#: Largest and smallest share, relative to equal ones: memory is limited, and models that normalize
#: over their batch need at least two samples.
_LARGEST, _SMALLEST, _FEWEST = 2, 0.25, 2


@functools.lru_cache(maxsize=64)
def cut_sizes(samples: int, speeds: Speeds) -> tuple[int, ...]:
    """Samples for ranks of these speeds, so that the last rank finishes as early as possible.

    No rank has more than twice its equal share, less than a quarter of it, or a single sample
    unless its equal share is one.

    Args:
        samples: Samples of all ranks, at least one for each.
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
    """Return whether every rank can compute the batches of all ranks."""
    sampler = loader.sampler
    return (
        type(sampler) is DistributedSampler
        and type(loader.batch_sampler) is BatchSampler
        and getattr(loader, "in_order", True)
        and (sampler.rank, sampler.num_replicas) == (rank, ranks)
    )


class Batches:
    """Replaces the sampler of a loader's iterator as the source of batch indices.

    Args:
        loader: The loader; :func:`can_be_cut` is true of it.
        iterator: Its iterator, which has yielded no batch yet.
        rank: This rank.
        weigher: What weighs its batches, which the iterator keeps.

    Attributes:
        begun: Batches that workers had before they could be split.
        planned: The number of the next batch that neither a worker nor the script has.
        used: Batches that steps have used.
        loader: The loader.
        speeds: The speeds by which batches from ``cut_from`` on are split.
        weigher: As above; ``None`` once nothing has to weigh them any more.
    """

    def __init__(self, loader: Any, iterator: Any, rank: int, weigher: object = None) -> None:
        self.begun = self.planned = int(getattr(iterator, "_send_idx", 0))
        self.used = 0
        self.loader = weakref.ref(loader)
        self._rank = rank
        self._sampler = copy.copy(loader.sampler)  # before the script tells it the next epoch
        self.speeds: Speeds = (1.0,) * self._sampler.num_replicas
        self.cut_from = 0
        self.weigher = weigher
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
        """What must be the same on all ranks."""
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
        """Samples of all ranks in a batch other than the last."""
        return self._batch_size * len(self.speeds)

    def cut(self, first: int, speeds: Speeds) -> None:
        """Split batches from number ``first`` on by these speeds."""
        self._earlier.insert(0, (self.cut_from, self.speeds))
        self.cut_from, self.speeds = first, speeds

    def sizes(self, number: int) -> tuple[int, ...]:
        """Return every rank's samples of that batch."""
        end = min(self._begin_of(number + 1), self._sampler.total_size)
        cuts = [(self.cut_from, self.speeds), *self._earlier]
        speeds = next(speeds for first, speeds in cuts if first <= number)
        return cut_sizes(end - self._begin_of(number), speeds)

    def equal_from(self, number: int) -> bool:
        """Return whether no batch from that number on has another size than on other ranks."""
        return len(set(self.speeds)) == 1 and number >= self.cut_from

    def weight(self, number: int) -> float:
        """Gradient weight of this rank's part of that batch."""
        sizes = self.sizes(number)
        return sizes[self._rank] * len(sizes) / sum(sizes)

    def use(self, given: int) -> int:
        """Mark the batches before number ``given`` as used; returns this rank's samples in them."""
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


def batches_of(iterator: Any) -> Batches | None:
    """Return the batches of an iterator whose sampler they have replaced, in its current epoch."""
    found = getattr(iterator, "_sampler_iter", None)
    return found if isinstance(found, Batches) else None
