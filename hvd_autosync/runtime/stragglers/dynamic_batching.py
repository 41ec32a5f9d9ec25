"""Gives each rank batches as large as it is fast, so that the others do not wait for a slow one.

The samples of one step are the same as before, but cut anew between ranks (``cutting.py``) in
proportion to their speeds. A gradient is weighted by the samples that it is the mean of, so that
the mean over ranks is the mean over all samples, as it was::

    weight = own samples of the batch * ranks / all samples of the batch

So nothing changes but the order of sums, where samples do not depend on others of their batch, as
they do under batch normalization. Each rank makes as many steps as before.

Ranks decide together, in votes, and tell each other a digest of what they decide by: where these
differ, as after a pass that not all ranks ended alike, all begin anew with equal batches.
"""

from __future__ import annotations

import statistics
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from hvd_autosync.runtime.measure.compute_timer import WINDOW
from hvd_autosync.runtime.patches.epochs import Epochs
from hvd_autosync.runtime.patches.gradient_weight import weight_backward
from hvd_autosync.runtime.stragglers.batch_split import Batches, Speeds, can_be_cut, cut_sizes

#: How much sooner a step must be over for batches to change, and in how many votes in a row.
_GAIN, _PATIENCE = 1.1, 3
#: After how many votes it is said that batches cannot be cut.
_TELL_AFTER = 8


class DynamicBatching:
    """One rank's part; the last one that was made in this process is the only one to cut anything.

    Args:
        rank: This rank.
        ranks: How many there are.
        epochs: Those that may feed the training.

    Attributes:
        speeds: By which batches are cut; equal at first.
    """

    _newest: weakref.ref[DynamicBatching] | None = None

    def __init__(self, rank: int, ranks: int, epochs: Epochs) -> None:
        self._rank, self._ranks = rank, ranks
        self._epochs = epochs
        self._equal: Speeds = (1.0,) * ranks
        self.speeds = self._equal
        #: The batches of loaders' iterators, by these.
        self._batches: weakref.WeakKeyDictionary[Any, Batches] = weakref.WeakKeyDictionary()
        #: The iterator that feeds the training, the loader that it is of, and from which batch on
        #: all ranks can cut those of the next pass.
        self._iterator: weakref.ref[Any] | None = None
        self._loader: weakref.ref[Any] | None = None
        self._first = 0
        #: Samples per second in the last steps; what all ranks were in the last votes.
        self._own_speeds: deque[float] = deque(maxlen=WINDOW)
        self._recent: list[Speeds] = []
        self._votes = 0
        self._said: tuple[int, ...] = ()
        DynamicBatching._newest = weakref.ref(self)
        epochs.call_on_begin(self.on_begin)
        weight_backward(self.weight)

    @property
    def unequal(self) -> bool:
        """Whether ranks have batches of different sizes."""
        return self.speeds != self._equal

    def on_begin(self, loader: Any, iterator: Any) -> None:
        """A pass has begun; its batches can be cut if it turns out to feed the training."""
        if not torch.is_grad_enabled() or not self._is_newest():
            return
        if can_be_cut(loader, self._rank, self._ranks):
            self._batches[iterator] = batches = Batches(loader, iterator, self._rank)
            if self._loader is not None and self._loader() is loader and self.unequal:
                batches.cut(max(self._first, batches.begun), self.speeds)

    def stepped(self, seconds: float) -> None:
        """A step was made, which took so long without waiting."""
        self._iterator = self._loader = None
        iterators = self._epochs.last_iterators
        if len(iterators) == 1 and iterators[0] in self._batches:
            batches = self._batches[iterators[0]]
            self._iterator, self._loader = weakref.ref(iterators[0]), batches.loader
            samples = batches.use(iterators[0]._num_yielded)
            if samples and seconds > 0:
                self._own_speeds.append(samples / seconds)

    def weight(self) -> float:
        """Of the gradient of the batch that the script was given last."""
        giving = self._epochs.next_iterators or (
            [] if self._iterator is None else [self._iterator()]
        )
        known = [each for each in giving if each in self._batches]
        if len(known) != 1 or len(giving) != 1:
            return 1.0
        return self._batches[known[0]].weight(known[0]._num_yielded - 1)

    def vote(self) -> list[float]:
        """What this rank tells the others, for :meth:`voted`."""
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
        """Take all ranks' votes, and cut batches anew where that pays."""
        self._votes += 1
        speeds, planned, begun, kinds, decided = zip(*votes, strict=True)
        batches = self._own()
        if batches is None or not all(speeds) or len(set(kinds)) > 1:
            self._recent.clear()
            if self._votes == _TELL_AFTER and not self.unequal:
                self._say(
                    "batches stay as they are: they come from no single DataLoader with torch's "
                    "own DistributedSampler, or not from the same data on all ranks"
                )
            return
        self._first = int(max(begun))
        if len(set(decided)) > 1:
            self._recent.clear()
            self.speeds = self._equal
        else:
            self._look(speeds, batches)
        if batches.speeds != self.speeds or len(set(decided)) > 1:
            batches.cut(int(max(planned)), self.speeds)
        sizes = cut_sizes(batches.whole, self.speeds)
        if sizes != self._said and (self._said or self.unequal):
            self._said = sizes
            self._say(f"of {sum(sizes)} samples of a step ranks take {', '.join(map(str, sizes))}")

    def forget(self) -> None:
        """Some ranks may have missed votes."""
        self._recent.clear()

    @property
    def planned(self) -> int:
        """Batches of the running pass that cannot be cut any more."""
        batches = self._own()
        return 0 if batches is None else batches.planned

    def end(self, first: int) -> None:
        """Let batches be equal again, in the running pass from that number on."""
        batches = self._own()
        if batches is not None and self.unequal:
            batches.cut(first, self._equal)
        self.speeds = self._equal

    def _look(self, speeds: Speeds, batches: Batches) -> None:
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
        return DynamicBatching._newest is not None and DynamicBatching._newest() is self

    def _own(self) -> Batches | None:
        iterator = None if self._iterator is None else self._iterator()
        return None if iterator is None else self._batches.get(iterator)

    def _say(self, text: str) -> None:
        if self._rank == 0:
            print(f"hvd-autosync: {text}", file=sys.stderr)


def _digest(decided: object) -> float:
    return float(zlib.crc32(repr(decided).encode()) or 1)
