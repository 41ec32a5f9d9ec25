"""Gives each rank batches as large as it is fast, so that the others do not wait for a slow one.

Where all ranks draw from one data set by torch's ``DistributedSampler``, each of them can tell the
batches of all: batch n of every rank, together, is a slice of the order that they have in common.
It is cut anew, in proportion to the ranks' speeds, and a gradient is weighted by the samples that
it is the mean of, so that the sum over ranks is the mean over the same samples as before::

    weight = own samples of the batch * ranks / all samples of the batch

So nothing changes but the order of sums, where samples do not depend on their batch, as they do
under batch normalization. Each rank makes as many steps as before, whatever its batches' sizes.
"""

from __future__ import annotations

import copy
import functools
import heapq
import math
import statistics
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler

from hvd_autosync.runtime.pace import WINDOW

#: How much sooner a step must be over for batches to change, and in how many windows in a row.
_GAIN, _PATIENCE = 1.1, 3
#: Most samples of a batch, in batches of the script's size: memory is made for one.
_LARGEST = 2

#: Samples per second of each rank.
Speeds = tuple[float, ...]


class Balancing:
    """One rank's part.

    Args:
        rank: This rank.
        ranks: How many there are.

    Attributes:
        speeds: By which batches are cut; equal at first.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.speeds: Speeds = (1.0,) * ranks
        self._rank, self._ranks = rank, ranks
        #: The batches of loaders' iterators, by these.
        self._batches: weakref.WeakKeyDictionary[Any, _Batches] = weakref.WeakKeyDictionary()
        #: The iterator that feeds the training, and the loader that it is of.
        self._iterator: weakref.ref[Any] | None = None
        self._loader: weakref.ref[Any] | None = None
        self._recent: deque[Speeds] = deque(maxlen=_PATIENCE)

    @property
    def unequal(self) -> bool:
        """Whether ranks have batches of different sizes."""
        return len(set(self.speeds)) > 1

    def begun(self, loader: Any, iterator: Any) -> None:
        """A pass has begun; its batches can be cut if it turns out to feed the training."""
        if not torch.is_grad_enabled() or not self._fits(loader):
            return
        batches = _Batches(loader, iterator, self._rank)
        self._batches[iterator] = batches
        if self._loader is not None and self._loader() is loader:
            self._iterator = weakref.ref(iterator)
            batches.cut(batches.place, self.speeds)

    def fed_by(self, iterators: Sequence[Any]) -> None:
        """The last step used batches of these; only those of a single one can be cut."""
        self._iterator = self._loader = None
        if len(iterators) == 1 and iterators[0] in self._batches:
            self._iterator = weakref.ref(iterators[0])
            self._loader = self._batches[iterators[0]].loader

    @property
    def place(self) -> tuple[int, int]:
        """Of the pass that feeds the training: batches planned and used; 0 and 0 without one."""
        own = self._own()
        return (0, 0) if own is None else (own[1].place, own[0]._num_yielded)

    def weight(self) -> float:
        """Of the gradient of the batch that the script was given last."""
        own = self._own()
        return 1.0 if own is None else own[1].weight(own[0]._num_yielded - 1)

    def window(self, seconds: Sequence[float], places: Sequence[tuple[int, int]]) -> list[int]:
        """Take what all ranks know of the last window.

        Args:
            seconds: Of a step, of each rank, without waiting.
            places: :attr:`place` of each rank.

        Returns:
            The ranks' new shares of a step's samples, where they change.
        """
        own = self._own()
        if own is None or not all(used for _, used in places) or min(seconds) <= 0:
            self._recent.clear()
            return []
        batches = own[1]
        planned, used = (max(each) for each in zip(*places, strict=True))
        if used < batches.cut_from + WINDOW:
            return []  # this window has batches of before
        samples = batches.sizes(used - 1)
        speeds = tuple(n / s for n, s in zip(samples, seconds, strict=True))
        better = sizes(sum(samples), speeds)
        then = max(n / speed for n, speed in zip(better, speeds, strict=True))
        changes = batches.speeds != self.speeds  # of a loader that is made anew for each pass
        if max(seconds) < _GAIN * then:
            self._recent.clear()
        else:
            self._recent.append(speeds)
            if len(self._recent) == _PATIENCE:
                each_ranks = zip(*self._recent, strict=True)
                self.speeds = tuple(statistics.geometric_mean(own) for own in each_ranks)
                self._recent.clear()
                changes = True
        if not changes:
            return []
        batches.cut(planned, self.speeds)
        return list(sizes(sum(samples), self.speeds))

    def _own(self) -> tuple[Any, _Batches] | None:
        iterator = None if self._iterator is None else self._iterator()
        return None if iterator is None else (iterator, self._batches[iterator])

    def _fits(self, loader: Any) -> bool:
        sampler = loader.sampler
        return (
            type(sampler) is DistributedSampler
            and type(loader.batch_sampler) is BatchSampler
            and (sampler.rank, sampler.num_replicas) == (self._rank, self._ranks)
        )


class _Batches:
    """From where a loader's iterator has the indices of its batches, in place of its sampler's.

    Attributes:
        place: The number of the next batch; workers have theirs long before the script.
        loader: The loader.
        speeds: By which batches are cut from batch ``cut_from`` on.
    """

    def __init__(self, loader: Any, iterator: Any, rank: int) -> None:
        self.place = int(getattr(iterator, "_send_idx", 0))
        self.loader = weakref.ref(loader)
        self._rank = rank
        self._sampler = copy.copy(loader.sampler)  # before the script tells it the next epoch
        self.speeds: Speeds = (1.0,) * self._sampler.num_replicas
        self._samples: int = loader.batch_size * len(self.speeds)
        self.cut_from = 0
        self._before: list[tuple[int, Speeds]] = []
        self._original: Iterator[list[int]] = iterator._sampler_iter
        iterator._sampler_iter = self

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        batch = next(self._original)
        place, self.place = self.place, self.place + 1
        shares = self.sizes(place)
        if len(set(shares)) > 1:
            begin = self._begin(place) + sum(shares[: self._rank])
            batch = self._order[begin : begin + shares[self._rank]]
        return batch

    def cut(self, first: int, speeds: Speeds) -> None:
        """Cut batches from number ``first`` on by these speeds."""
        self._before.insert(0, (self.cut_from, self.speeds))
        self.cut_from, self.speeds = first, speeds

    def sizes(self, place: int) -> Sequence[int]:
        """Every rank's samples of the batch of that number."""
        end = min(self._begin(place + 1), self._sampler.total_size)
        all_cuts = [(self.cut_from, self.speeds), *self._before]
        speeds = next(speeds for first, speeds in all_cuts if first <= place)
        return sizes(end - self._begin(place), speeds)

    def weight(self, place: int) -> float:
        """Of the mean over this rank's part of the batch of that number."""
        shares = self.sizes(place)
        return shares[self._rank] * len(shares) / sum(shares)

    def _begin(self, place: int) -> int:
        return place * self._samples

    @functools.cached_property
    def _order(self) -> list[int]:
        """All samples of the pass: rank r of n has every n-th, from the r-th on."""
        whole = copy.copy(self._sampler)
        whole.rank, whole.num_replicas, whole.num_samples = 0, 1, whole.total_size
        return list(whole)


@functools.lru_cache(maxsize=64)
def sizes(samples: int, speeds: Speeds) -> tuple[int, ...]:
    """Samples for ranks of these speeds, so that the last of them is ready as soon as can be.

    Each rank has one sample at least, and not more than twice its equal share.

    Args:
        samples: Of all ranks, at least one of each.
        speeds: Samples per second.
    """
    if len(set(speeds)) == 1:
        whole, rest = divmod(samples, len(speeds))
        return tuple(whole + (rank < rest) for rank in range(len(speeds)))
    most = _LARGEST * math.ceil(samples / len(speeds))
    found = [1] * len(speeds)
    ready = [(2 / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(ready)
    for _ in range(samples - len(speeds)):
        _, rank = heapq.heappop(ready)
        found[rank] += 1
        if found[rank] < most:
            heapq.heappush(ready, ((found[rank] + 1) / speeds[rank], rank))
    return tuple(found)


def say_shares(shares: Sequence[int]) -> None:
    """Tell the user, on one rank."""
    print(
        f"hvd-autosync: ranks are not equally fast: of {sum(shares)} samples of a step they now "
        f"take {', '.join(map(str, shares))}", file=sys.stderr,
    )  # fmt: skip
