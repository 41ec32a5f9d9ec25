"""Dynamic batching: sizes each rank's batch by its speed, so that the others do not wait.

A step uses the same samples as before, but splits them between ranks (``batch_split.py``) in
proportion to their speeds. A gradient is weighted by the number of samples that it is the mean of,
so that the mean over ranks is the mean over all samples, as before::

    weight = own samples of the batch * ranks / all samples of the batch

So only the order of sums changes, if samples do not depend on others of their batch, as they do
under batch normalization. Each rank makes as many steps as before.

Ranks decide together, in votes, and exchange a digest of what they decide by. If digests differ, as
after an epoch that not all ranks ended alike, all restart with equal batches.

Workers of a loader have batches before the script gets them. So after the end of dynamic batching
an iterator keeps what weighs its batches, until it has yielded the last one of unequal size.
"""

from __future__ import annotations

import statistics
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from hvd_autosync.runtime.collectives.operations import once_per_rank
from hvd_autosync.runtime.measure.compute_timer import WINDOW
from hvd_autosync.runtime.patches.epochs import Epochs
from hvd_autosync.runtime.patches.gradient_weight import weight_backward
from hvd_autosync.runtime.stragglers.batch_split import (
    Batches,
    Speeds,
    batches_of,
    can_be_cut,
    cut_sizes,
)
from hvd_autosync.util.print_line import print_line

#: Speed-up of a step from which batches change, and votes in a row that must show it.
_GAIN, _PATIENCE = 1.1, 3
#: Votes after which rank 0 reports that batches cannot be split.
_TELL_AFTER = 8


@once_per_rank
def _newest() -> deque[weakref.ref[DynamicBatching]]:
    """Return the instance that splits this rank's batches."""
    return deque(maxlen=1)


class DynamicBatching:
    """One rank's part. Only the newest instance of a rank splits batches.

    Args:
        rank: This rank.
        ranks: The number of ranks.
        epochs: Those that may belong to the training.

    Attributes:
        speeds: The speeds by which batches are split; equal at first.
    """

    def __init__(self, rank: int, ranks: int, epochs: Epochs) -> None:
        self._rank, self._ranks = rank, ranks
        self._epochs = epochs
        self._equal: Speeds = (1.0,) * ranks
        self.speeds = self._equal
        self._ended = False
        #: The training's iterator, its loader, and the first batch from which all ranks can split
        #: those of the next epoch.
        self._iterator: weakref.ref[Any] | None = None
        self._loader: weakref.ref[Any] | None = None
        self._first = 0
        #: Samples per second in the last steps; speeds of all ranks in the last votes.
        self._own_speeds: deque[float] = deque(maxlen=WINDOW)
        self._recent: list[Speeds] = []
        self._votes = 0
        self._reported_sizes: tuple[int, ...] = ()
        _newest().append(weakref.ref(self))
        epochs.call_on_begin(self.on_begin)
        weight_backward(self.weight)
        for iterator in epochs.last_iterators:
            # Batches of an earlier instance, whose later steps nobody has timed.
            if (batches := batches_of(iterator)) is not None:
                batches.weigher = self
                batches.use(iterator._num_yielded)

    @property
    def unequal(self) -> bool:
        """Whether ranks have batches of different sizes."""
        return self.speeds != self._equal

    def on_begin(self, loader: Any, iterator: Any) -> None:
        """An epoch begins; its batches can be split if it turns out to be the training's."""
        if self._ended or not torch.is_grad_enabled() or not self._is_newest():
            return
        if can_be_cut(loader, self._rank, self._ranks):
            batches = Batches(loader, iterator, self._rank, weigher=self)
            if self._loader is not None and self._loader() is loader and self.unequal:
                batches.cut(max(self._first, batches.begun), self.speeds)

    def stepped(self, seconds: float) -> None:
        """A step was made that took ``seconds`` without waiting."""
        self._iterator = self._loader = None
        iterators = self._epochs.last_iterators
        batches = batches_of(iterators[0]) if len(iterators) == 1 else None
        if batches is not None:
            self._iterator, self._loader = weakref.ref(iterators[0]), batches.loader
            samples = batches.use(iterators[0]._num_yielded)
            if samples and seconds > 0:
                self._own_speeds.append(samples / seconds)

    def weight(self) -> float:
        """Return the gradient weight of the batch that the script received last."""
        giving = self._epochs.next_iterators or self._epochs.last_iterators
        batches = batches_of(giving[0]) if len(giving) == 1 else None
        if batches is None:
            return 1.0
        number = giving[0]._num_yielded - 1
        if self._ended and batches.equal_from(number):
            batches.weigher = None
        return batches.weight(number)

    def vote(self) -> list[float]:
        """Return what this rank sends to the others, for :meth:`voted`."""
        batches = self._own()
        if batches is None or not self._own_speeds:
            return [0.0] * 5
        decided = (self._recent, self.speeds, batches.speeds, batches.cut_from, self._first)
        return [
            statistics.median(self._own_speeds),
            batches.planned,
            batches.begun,
            _digest(batches.kind),
            _digest(decided),
        ]

    def voted(self, votes: Sequence[Sequence[float]]) -> None:
        """Take all ranks' votes, and change the batch split where that pays off."""
        self._votes += 1
        speeds, planned, begun, kinds, decided = zip(*votes, strict=True)
        batches = self._own()
        if batches is None or not all(speeds) or len(set(kinds)) > 1:
            self._recent.clear()
            if self._votes == _TELL_AFTER and not self.unequal:
                self._print(
                    "stragglers='balance': batches keep their sizes, because they do not come from "
                    "a single DataLoader with torch's own DistributedSampler, or not from the same "
                    "data on all ranks"
                )
            return
        self._first = int(max(begun))
        if len(set(decided)) > 1:
            self._recent.clear()
            self.speeds = self._equal
        else:
            self._update_speeds(speeds, batches)
        if batches.speeds != self.speeds or len(set(decided)) > 1:
            batches.cut(int(max(planned)), self.speeds)
        sizes = cut_sizes(batches.whole, self.speeds)
        if sizes != self._reported_sizes and (self._reported_sizes or self.unequal):
            self._reported_sizes = sizes
            self._print(f"ranks take {', '.join(map(str, sizes))} of a step's {sum(sizes)} samples")

    def forget(self) -> None:
        """Forget recent votes, which some ranks may have missed."""
        self._recent.clear()

    @property
    def planned(self) -> int:
        """Number of batches of the current epoch that cannot be split any more."""
        batches = self._own()
        return 0 if batches is None else batches.planned

    def end(self, first: int) -> None:
        """Make batches equal again for good, in the current epoch from batch ``first`` on."""
        batches = self._own()
        if batches is not None and batches.speeds != self._equal:
            batches.cut(first, self._equal)
        self.speeds = self._equal
        self._ended = True

    def _update_speeds(self, speeds: Speeds, batches: Batches) -> None:
        def ready(sizes: Sequence[int]) -> float:
            return max(size / speed for size, speed in zip(sizes, speeds, strict=True))

        now = ready(cut_sizes(batches.whole, self.speeds))
        if now < _GAIN * ready(cut_sizes(batches.whole, speeds)):
            self._recent.clear()
            return
        self._recent.append(speeds)
        if len(self._recent) == _PATIENCE:
            by_rank = zip(*self._recent, strict=True)
            self.speeds = tuple(statistics.geometric_mean(each) for each in by_rank)
            self._recent.clear()

    def _is_newest(self) -> bool:
        return any(each() is self for each in _newest())

    def _own(self) -> Batches | None:
        iterator = None if self._iterator is None else self._iterator()
        return None if iterator is None else batches_of(iterator)

    def _print(self, text: str) -> None:
        if self._rank == 0:
            print_line(text)


def _digest(decided: object) -> float:
    return float(zlib.crc32(repr(decided).encode()) or 1)
