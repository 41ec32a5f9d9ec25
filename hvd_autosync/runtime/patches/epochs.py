"""Finds where epochs end, from the script's ``DataLoader``.

No call tells an optimizer that an epoch ends. But a ``DataLoader`` knows how many batches it has,
its iterator how many it has yielded, and the iterator of a loop that is left early is collected.

Collectives are for the thread that trains: a loader that another iterates is one without an end.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch

from hvd_autosync.util import patches

#: Steps whose numbers of batches say how many the next ones may use.
_RECENT = 8


class SyncPoint(Enum):
    """Why parameters must be equal on all ranks now."""

    EPOCH_END = "an epoch has ended"
    EVALUATION = "another loader's epoch begins in the middle of one, as for an evaluation"
    SCRIPT = "the script calls for it"


class SyncPoints(Protocol):
    """What has to synchronize replicas at the end of an epoch."""

    @property
    def replicas_in_sync(self) -> bool:
        """Whether parameters are the same on all ranks."""

    def at_sync_point(self, why: SyncPoint) -> None:
        """Make parameters equal, unless they are; a collective."""


class AlwaysInSync:
    """Sync points of a training whose replicas never differ: its epochs are only looked at."""

    @property
    def replicas_in_sync(self) -> bool:
        """Always true."""
        return True

    def at_sync_point(self, why: SyncPoint) -> None:
        """Do nothing."""


class Epochs:
    """The epochs of one optimizer's training.

    Args:
        sync_points: Averages when the epoch of a training loader ends, and when another
            loader's begins meanwhile, as for an evaluation.

    Attributes:
        samples: Samples of this rank's epochs so far, where they can be counted.
        error: What failed at the end of an epoch.
    """

    def __init__(self, sync_points: SyncPoints) -> None:
        self._sync_points = weakref.ref(sync_points)
        self._on_begin: weakref.WeakMethod[Callable[[Any, Any], None]] | None = None
        self._epochs: dict[int, _Epoch] = {}
        #: The epochs of the last step that had new batches.
        self._latest: list[_Epoch] = []
        #: Batches that each of the last steps with new ones has used.
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._thread: int | None = None  # that makes steps
        self.samples = 0
        self.error: Exception | None = None
        _listen()
        _LISTENING.append(weakref.ref(self, _forget))

    @property
    def sync_points(self) -> SyncPoints | None:
        """The sync points of the optimizer; ``None`` once that is gone."""
        return self._sync_points()

    def on_begin(self, loader: Any, iterator: Any) -> None:
        """An epoch begins."""
        key = id(iterator)
        self.on_iterator_gone(key)  # persistent workers keep theirs, whose last epoch is over
        on_begin = None if self._on_begin is None else self._on_begin()
        if on_begin is not None:
            on_begin(loader, iterator)
        try:
            batches = len(loader)
        except Exception:  # as its dataset or sampler likes
            return  # a stream, whose end is unknown
        reference = weakref.ref(iterator, functools.partial(_on_gone, weakref.ref(self), key))
        if not self.elsewhere:
            self._epochs[key] = _Epoch(reference, batches, loader.batch_size)

    @property
    def elsewhere(self) -> bool:
        """Whether another thread than this one makes the steps."""
        return self._thread not in (None, threading.get_ident())

    def call_on_begin(self, on_begin: Callable[[Any, Any], None]) -> None:
        """Call a method with the loader and its iterator when an epoch begins, of any length.

        Its object is not kept alive.
        """
        self._on_begin = weakref.WeakMethod(on_begin)

    @property
    def seen(self) -> bool:
        """Whether the last step used batches of an epoch whose end is known."""
        return any(each.is_training_loader for each in self._epochs.values())

    @property
    def has_open(self) -> bool:
        """Whether the end of an epoch of the training is to come, if only by its collection."""
        return any(each.state is _State.TRAINING for each in self._epochs.values())

    @property
    def last_iterators(self) -> list[Any]:
        """Iterators whose batches the last step used."""
        return _alive(each for each in self._epochs.values() if each.is_training_loader)

    @property
    def next_iterators(self) -> list[Any]:
        """Iterators that have yielded batches for the next step."""
        return _alive(each for each in self._epochs.values() if each.given() > each.used)

    def stepped(self) -> None:
        """Assign the batches yielded since the last step to the step that was just made.

        Raises:
            ConfigurationError: Some ranks have ended a round of local steps at the end of an epoch,
                others have not.
            HorovodInternalError: Another rank has failed.
        """
        self._thread = threading.get_ident()
        if self.error is not None:
            raise self.error
        per_step = 0
        latest: list[_Epoch] = []
        self._epochs = {k: e for k, e in self._epochs.items() if e.thread == self._thread}
        for each in self._epochs.values():
            new = each.given() - each.used
            each.is_training_loader = new > 0
            if new > 0:
                latest.append(each)
            each.used += new
            per_step = max(per_step, new)
            self.samples += each.samples
            each.samples = 0
        if per_step:
            self._recent.append(per_step)
        # An evaluation has no steps: another epoch of the training has begun.
        if any(each.state is not _State.PAUSED for each in latest):
            for each in self._epochs.values():
                if each.state is _State.PAUSED:
                    each.state = _State.IN_SYNC
        # A step without new batches has those of an earlier one, or some that were fetched ahead.
        self._latest = latest or self._latest
        for each in self._latest:
            each.state = _State.TRAINING

    def check(self) -> None:
        """Notice iterators that another thread has collected; raise what failed at an epoch's end.

        Raises:
            ConfigurationError: As of :meth:`stepped`.
            HorovodInternalError: As of :meth:`stepped`.
        """
        for key, each in self._epochs.copy().items():
            if each.iterator() is None:
                self.on_iterator_gone(key)
        if self.error is not None:
            raise self.error

    @property
    def _per_step(self) -> int:
        """The most batches that a step uses; 0 while it is not known.

        Some steps use fewer, as under a budget of tokens, or the last of an epoch. After steps that
        were skipped, one may have used more than later ones do.
        """
        return max(self._recent, default=0)

    def remaining(self) -> int | None:
        """Least steps until an epoch ends, the current one included; ``None`` while none is seen.

        1 while it is not known how many batches a step uses.
        """
        per_step = self._per_step
        counts = [
            (each.batches - each.given()) // per_step + 1 if per_step else 1
            for each in self._epochs.values()
            if each.given() > each.used
        ]
        return min(counts, default=None)

    @property
    def at_end(self) -> bool:
        """Whether the last step used the last batch of an exhausted iterator."""
        return any(each.exhausted and each.is_training_loader for each in self._epochs.values())

    def on_exhausted(self, key: int) -> None:
        """An iterator has yielded all its batches.

        Steps may still use the last ones: of a loop that fetches ahead, but not those that are the
        rest of an accumulation. Their number does not say which, so the epoch ends with a step that
        uses them, or with the iterator.
        """
        own = self._epochs.get(key)
        if own is None or own.exhausted or self._left(own):
            return
        own.exhausted = True
        unused = own.given() - own.used
        if own.state is _State.FRESH and unused > self._per_step + 1:
            # No step was made during its epoch, so it belongs to another loop. An iterator that
            # prefetches for the training has at most the batches of one step unused here.
            del self._epochs[key]
        elif own.state is not _State.FRESH and unused <= 0:
            own.state = _State.IN_SYNC
            self._end()

    def on_batch(self, key: int, batch: Any) -> None:
        """An iterator has yielded a batch; where gradients are off it is for no step."""
        own = self._epochs.get(key)
        if own is None or self._left(own):
            return
        if torch.is_grad_enabled():
            own.samples += own.batch_size or _samples_of(batch)
        else:
            own.used += 1

    def truncate(self) -> None:
        """Truncate the epochs of the training loaders: their iterators yield nothing more."""
        for each in self._epochs.values():
            each.truncated = each.truncated or each.is_training_loader

    def is_truncated(self, key: int) -> bool:
        """Return whether the iterator with this key is to yield nothing more."""
        own = self._epochs.get(key)
        return own is not None and own.truncated and own.iterator() is not None

    def on_iterator_gone(self, key: int) -> None:
        """An iterator was collected, perhaps long after its epoch, and on this rank alone."""
        if self.elsewhere:
            return  # it is noticed where the next epoch begins
        own = self._epochs.pop(key, None)
        if own is not None and own.state in (_State.TRAINING, _State.PAUSED):
            self._end()

    def on_in_sync(self) -> None:
        """Replicas are in sync where a loader begins an epoch, of an evaluation or the training.

        Older ones have no end to come in the latter case alone; whose batches the next step uses
        tells which it is.
        """
        for each in self._epochs.values():
            if each.state is _State.TRAINING:
                each.state = _State.PAUSED

    def _left(self, epoch: _Epoch) -> bool:
        """Return whether an epoch has been left to another thread than the one that began it."""
        here = epoch.thread == threading.get_ident()
        if not here and epoch.iterator() is not None:  # else its key is that of another by now
            epoch.thread = None
        return not here

    def _end(self) -> None:
        sync_points = self.sync_points
        if sync_points is not None:
            sync_points.at_sync_point(SyncPoint.EPOCH_END)


class _State(Enum):
    """What an iterator is to the training; its collection ends an epoch in two of the states.

    A step that uses its batches makes it ``TRAINING`` in each of them::

        FRESH -- step --> TRAINING -- another begins --> PAUSED -- step of another --> IN_SYNC
                          TRAINING or PAUSED -- its end ----------------------------> IN_SYNC
    """

    FRESH = "no step has used any of its batches"
    TRAINING = "a step has used some since replicas were in sync where an epoch ended or began"
    PAUSED = "no step has since one began, which may be an evaluation's: its own may go on, or end"
    IN_SYNC = "no step has since then, and its epoch is over"


@dataclass
class _Epoch:
    """One iterator of a loader.

    Attributes:
        iterator: The iterator, as long as it is referenced.
        batches: How many batches it has.
        batch_size: Samples of a batch; ``None`` if the loader does not know it.
        used: Batches that steps have used.
        samples: Samples of batches that no step has used yet.
        state: What it is to the training.
        is_training_loader: Whether the last step used any of its batches.
        exhausted: Whether it has yielded all batches.
        truncated: Whether it is to yield no more.
        thread: The thread that iterates; ``None``: not the one that has begun.
    """

    iterator: weakref.ref[Any]
    batches: int
    batch_size: int | None
    used: int = 0
    samples: int = 0
    state: _State = _State.FRESH
    is_training_loader: bool = False
    exhausted: bool = False
    truncated: bool = False
    thread: int | None = field(default_factory=threading.get_ident)

    def given(self) -> int:
        """Batches that it has yielded so far."""
        return int(getattr(self.iterator(), "_num_yielded", self.used))


def _alive(epochs: Iterable[_Epoch]) -> list[Any]:
    return [found for each in epochs if (found := each.iterator()) is not None]


#: What :func:`watch_epochs` has made.
_WATCHED: list[tuple[AlwaysInSync, Epochs]] = []


def watch_epochs(on_begin: Callable[[Any, Any], None]) -> None:
    """Call a method as of :meth:`Epochs.call_on_begin`, as long as this process lives.

    Args:
        on_begin: The method.
    """
    points = AlwaysInSync()
    epochs = Epochs(points)
    epochs.call_on_begin(on_begin)
    _WATCHED.append((points, epochs))


#: In order of creation, which is the same on all ranks: their collectives depend on it.
_LISTENING: list[weakref.ref[Epochs]] = []


def _forget(reference: weakref.ref[Epochs]) -> None:
    if reference in _LISTENING:  # not in a child process of the script's
        _LISTENING.remove(reference)


def _listening() -> list[Epochs]:
    return [epochs for each in _LISTENING if (epochs := each()) is not None]


def _sync_for_eval() -> None:
    """Synchronize replicas where another loader's epoch begins."""

    def own() -> list[Epochs]:
        return [epochs for epochs in _listening() if not epochs.elsewhere]

    def open_ones() -> list[SyncPoints]:
        points = [epochs.sync_points for epochs in own()]
        return [each for each in points if each is not None and not each.replicas_in_sync]

    counting = [each for each in own() if isinstance(each.sync_points, AlwaysInSync)]
    if open_ones() or any(each.has_open for each in own() if each not in counting):
        # Some ranks may have collected dropped optimizers and iterators, others not yet.
        gc.collect()
    for sync_points in open_ones():
        sync_points.at_sync_point(SyncPoint.EVALUATION)
    for epochs in own():
        if epochs.sync_points is not None and epochs.sync_points.replicas_in_sync:
            epochs.on_in_sync()


def _samples_of(batch: Any) -> int:
    """Return the common length of all tensors in a batch; 0 if they differ, or there are none."""
    lengths = {len(each) for each in _tensors(batch) if each.dim()}
    return lengths.pop() if len(lengths) == 1 else 0


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from _tensors([*batch.values()])
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _tensors(part)


def _on_gone(reference: weakref.ref[Epochs], key: int, _: Any) -> None:
    epochs = reference()
    if epochs is not None:
        try:
            epochs.on_iterator_gone(key)
        except Exception as error:  # raised in a finalizer it would only be printed
            epochs.error = error


def _listen() -> None:
    """Watch every epoch of this process from now on."""
    patches.install("epochs", _watching_loader, _watching_batches)


def _watching_loader(original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(original)
    def watched(self: Any) -> Iterator[Any]:
        for epochs in _listening():
            epochs.check()
        _sync_for_eval()
        iterator = original(self)
        for epochs in _listening():
            epochs.on_begin(self, iterator)
        return iterator

    return watched


def _watching_batches(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def watched_next(self: Any) -> Any:
        try:
            if any(epochs.is_truncated(id(self)) for epochs in _listening()):
                raise StopIteration
            batch = original(self)
        except StopIteration:
            for epochs in _listening():
                epochs.on_exhausted(id(self))
            raise
        for epochs in _listening():
            epochs.on_batch(id(self), batch)
        return batch

    return watched_next


# Child processes of the script's take no part in collectives.
os.register_at_fork(after_in_child=_LISTENING.clear)
