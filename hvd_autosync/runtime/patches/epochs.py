"""Where passes over the training data end, as the script's ``DataLoader`` shows it.

Nobody tells an optimizer that an epoch ends. But a ``DataLoader`` knows how many batches it has,
its iterator how many it has given, and the iterator of a loop that is left early is gone.
"""

from __future__ import annotations

import functools
import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter


class SyncPoints(Protocol):
    """What a pass can end."""

    @property
    def equal(self) -> bool:
        """Whether parameters are the same on all ranks."""

    def average(self) -> None:
        """Make them so at the end of a pass, if they are not; a collective."""

    def sync_for_eval(self) -> None:
        """Make them so in the middle of one, where another pass begins; a collective."""


class Epochs:
    """The passes that feed one optimizer.

    Args:
        rounds: Told to average when the pass that feeds it is over, and when another one begins
            meanwhile, as for an evaluation.

    Attributes:
        samples: Samples of this rank's passes so far, where they can be counted.
        error: What went wrong at the end of a pass.
    """

    def __init__(self, rounds: SyncPoints) -> None:
        self._rounds = weakref.ref(rounds)
        self._begun: weakref.WeakMethod[Callable[[Any, Any], None]] | None = None
        self._epochs: dict[int, _Epoch] = {}
        #: Batches that a step uses, by the largest number so far.
        self._per_step = 0
        self.samples = 0
        self.error: Exception | None = None
        _listen()
        _LISTENING.append(weakref.ref(self, _forget))

    @property
    def rounds(self) -> SyncPoints | None:
        """Of the optimizer; ``None`` once that is gone."""
        return self._rounds()

    def begun(self, loader: Any, iterator: Any) -> None:
        """A pass has begun."""
        try:
            batches = len(loader)
        except TypeError:
            return  # of a stream, whose end nobody knows
        key = id(iterator)
        reference = weakref.ref(iterator, functools.partial(_gone, weakref.ref(self), key))
        self._epochs[key] = _Epoch(reference, batches, loader.batch_size)
        begun = None if self._begun is None else self._begun()
        if begun is not None:
            begun(loader, iterator)

    def tell_of(self, begun: Callable[[Any, Any], None]) -> None:
        """Call a method with the loader and its iterator when a pass begins, while it lives."""
        self._begun = weakref.WeakMethod(begun)

    @property
    def seen(self) -> bool:
        """Whether the last step used batches of a pass whose end is known."""
        return any(each.feeds for each in self._epochs.values())

    @property
    def feeding(self) -> list[Any]:
        """Iterators whose batches the last step used."""
        return _alive(each for each in self._epochs.values() if each.feeds)

    @property
    def giving(self) -> list[Any]:
        """Iterators whose batches the next step will use, as far as they were given."""
        return _alive(each for each in self._epochs.values() if each.given() > each.used)

    def stepped(self) -> None:
        """The optimizer has made a step with what iterators have given since the last one.

        Raises:
            ConfigurationError: Some ranks have ended a round at the end of a pass, others not.
            HorovodInternalError: Another rank has failed.
        """
        self.check()
        for each in self._epochs.values():
            new = each.given() - each.used
            each.feeds = new > 0
            each.has_fed = each.has_fed or each.feeds
            each.used += new
            self._per_step = max(self._per_step, new)
            self.samples += each.samples
            each.samples = 0

    def check(self) -> None:
        """Raise what went wrong at the end of a pass.

        Raises:
            ConfigurationError: As of :meth:`stepped`.
            HorovodInternalError: As there.
        """
        if self.error is not None:
            raise self.error

    def remaining(self) -> int | None:
        """Steps until a pass ends, the running one included; ``None`` while no pass is seen.

        1 while it is not known how many batches a step uses.
        """
        counts = [
            (each.batches - each.given()) // self._per_step + 1 if self._per_step else 1
            for each in self._epochs.values()
            if each.given() > each.used
        ]
        return min(counts, default=None)

    @property
    def at_end(self) -> bool:
        """Whether the last step used the last batch of an iterator that has no more."""
        return any(each.exhausted and each.feeds for each in self._epochs.values())

    def exhausted(self, key: int) -> None:
        """An iterator has no more to give; what it gave may still be used."""
        own = self._epochs.get(key)
        if own is None or own.exhausted:
            return
        own.exhausted = True
        if not own.has_fed and own.given() - own.used > self._per_step + 1:
            # No step was made from its begin to its end, so that it feeds another loop. Of one that
            # fetches ahead only the batches of a step are missing here.
            del self._epochs[key]
        elif own.has_fed and own.given() <= own.used:
            self._end()

    def gave(self, key: int, batch: Any) -> None:
        """An iterator has given a batch; none of it feeds a step where gradients are off."""
        own = self._epochs.get(key)
        if own is None:
            return
        if torch.is_grad_enabled():
            own.samples += own.batch_size or _samples_of(batch)
        else:
            own.used += 1

    def cut(self) -> None:
        """End the passes that feed this optimizer: their iterators give nothing more."""
        for each in self._epochs.values():
            each.cut = each.cut or each.feeds

    def is_cut(self, key: int) -> bool:
        """Whether the iterator of that number was told to give nothing more."""
        return key in self._epochs and self._epochs[key].cut

    def over(self, key: int) -> None:
        """The iterator of a pass is gone."""
        own = self._epochs.pop(key, None)
        if own is not None and own.has_fed:
            self._end()

    def _end(self) -> None:
        rounds = self.rounds
        if rounds is not None:
            rounds.average()


@dataclass
class _Epoch:
    """One iterator of a loader.

    Attributes:
        iterator: The iterator, as long as anybody holds it.
        batches: How many it has to give.
        batch_size: Samples of one; ``None`` where they are put together in another way.
        used: How many steps have used.
        samples: Of batches that no step has used yet.
        feeds: Whether the last step used any.
        has_fed: Whether any step has.
        exhausted: Whether it has given all.
        cut: Whether it is to give no more.
    """

    iterator: weakref.ref[Any]
    batches: int
    batch_size: int | None
    used: int = 0
    samples: int = 0
    feeds: bool = False
    has_fed: bool = False
    exhausted: bool = False
    cut: bool = False

    def given(self) -> int:
        """Batches that it has given so far."""
        return int(getattr(self.iterator(), "_num_yielded", self.used))


def _alive(passes: Iterable[_Epoch]) -> list[Any]:
    found = [each.iterator() for each in passes]
    return [each for each in found if each is not None]


#: In the order in which they were made: ranks must tell them in the same.
_LISTENING: list[weakref.ref[Epochs]] = []


def _forget(reference: weakref.ref[Epochs]) -> None:
    if reference in _LISTENING:  # not in a child of the script's own
        _LISTENING.remove(reference)


def _listening() -> list[Epochs]:
    return [passes for each in _LISTENING if (passes := each()) is not None]


def _interrupt() -> None:
    """Let parameters be equal where another pass begins."""

    def open_ones() -> list[SyncPoints]:
        all_rounds = (passes.rounds for passes in _listening())
        return [rounds for rounds in all_rounds if rounds is not None and not rounds.equal]

    if open_ones():
        # Of optimizers that the script has dropped, some ranks may have collected the rest.
        gc.collect()
    for rounds in open_ones():
        rounds.sync_for_eval()


def _samples_of(batch: Any) -> int:
    """The length of all tensors in a batch; 0 if they have different ones, or there are none."""
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


def _gone(reference: weakref.ref[Epochs], key: int, _: Any) -> None:
    passes = reference()
    if passes is not None:
        try:
            passes.over(key)
        except Exception as error:  # from here it would only be printed
            passes.error = error


@functools.cache
def _listen() -> None:
    """See every pass of this process from now on."""
    original: Callable[[Any], Iterator[Any]] = DataLoader.__iter__

    @functools.wraps(original)
    def watched(self: Any) -> Iterator[Any]:
        for passes in _listening():
            passes.check()
        _interrupt()
        iterator = original(self)
        for passes in _listening():
            passes.begun(self, iterator)
        return iterator

    original_next: Callable[[Any], Any] = _BaseDataLoaderIter.__next__

    @functools.wraps(original_next)
    def watched_next(self: Any) -> Any:
        try:
            if any(passes.is_cut(id(self)) for passes in _listening()):
                raise StopIteration
            batch = original_next(self)
        except StopIteration:
            for passes in _listening():
                passes.exhausted(id(self))
            raise
        for passes in _listening():
            passes.gave(id(self), batch)
        return batch

    # Children of the script's own take no part in collectives.
    os.register_at_fork(after_in_child=_LISTENING.clear)
    DataLoader.__iter__ = watched  # type: ignore[method-assign,assignment]
    _BaseDataLoaderIter.__next__ = watched_next  # type: ignore[method-assign]
