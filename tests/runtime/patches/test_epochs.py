"""Epochs of a process: how long they are, and what ends them."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hvd_autosync.runtime.patches.epochs import AlwaysInSync, Epochs, SyncPoint
from hvd_autosync.util import patches


class Stream(IterableDataset[torch.Tensor]):
    """A dataset that says in its own way that it has no length."""

    def __init__(self, length: object) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(4, 2)

    def __len__(self) -> int:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length  # type: ignore[return-value]


class Points:
    replicas_in_sync = True

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def on_begin(self, loader: Any, iterator: Any) -> None:
        self.begun.append(loader)

    def at_sync_point(self, why: SyncPoint) -> None:
        raise AssertionError(why)


class Noted(Points):
    """Notes the synchronization points."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[SyncPoint] = []

    def at_sync_point(self, why: SyncPoint) -> None:
        self.seen.append(why)


def loader_of(batches: int) -> Any:
    return DataLoader(torch.zeros(batches, 2), batch_size=1)


@pytest.fixture(autouse=True)
def _no_patch_is_left() -> Iterator[None]:
    yield
    patches.uninstall("epochs")


@pytest.mark.parametrize("length", [NotImplementedError(), TypeError(), -1, 1 << 100])
def test_a_loader_may_have_no_length(length: object) -> None:
    points = Points()
    epochs = Epochs(points)
    epochs.call_on_begin(points.on_begin)
    loader = DataLoader(Stream(length), batch_size=2)
    assert sum(1 for _ in loader) == 2
    assert not epochs.seen
    assert points.begun == [loader], "the step in which its workers start is unlike others"


def test_the_rest_of_an_accumulation_says_nothing_of_the_next_epoch() -> None:
    points = Noted()
    epochs = Epochs(points)
    loader = loader_of(10)
    for number, _ in enumerate(loader, 1):
        if number % 4 == 0 or number == 10:
            epochs.stepped()
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    assert epochs.remaining() == 2


def test_an_epoch_has_at_least_the_steps_that_its_largest_ones_would_be() -> None:
    """Under a budget of tokens steps differ; a round of local steps must end with the epoch."""
    points = Noted()
    epochs = Epochs(points)
    iterator = iter(loader_of(18))
    for batches in (4, 1, 4, 1):
        for _ in range(batches):
            next(iterator)
        epochs.stepped()
    next(iterator)
    assert epochs.remaining() == 2


@pytest.mark.parametrize("left", ["early", "at its end"])
def test_an_iterator_that_is_collected_late_ends_no_other_epoch(left: str) -> None:
    """Ranks collect one that is in a reference cycle at different times."""
    points = Noted()
    epochs = Epochs(points)
    first = iter(loader_of(3))
    for _ in range(2 if left == "early" else 3):
        next(first)
        epochs.stepped()
    if left == "at its end":
        assert next(first, None) is None
    ends = [] if left == "early" else [SyncPoint.EPOCH_END]
    assert points.seen == ends
    second = iter(loader_of(3))
    next(second)
    epochs.stepped()
    del first
    assert points.seen == ends
    del second
    assert points.seen == [*ends, SyncPoint.EPOCH_END]


def test_an_epoch_that_is_left_right_after_an_evaluation_ends_with_its_iterator() -> None:
    """Else a rank with less data would begin another one while the others wait for it."""
    points = Noted()
    epochs = Epochs(points)
    for _ in range(2):
        iterator = iter(loader_of(3))
        for _ in range(3):
            next(iterator)
            epochs.stepped()
        with torch.no_grad():
            assert sum(1 for _ in loader_of(2)) == 2
        assert points.seen == []
        del iterator
        assert points.seen == [SyncPoint.EPOCH_END]
        points.seen.clear()


def test_an_epoch_whose_end_is_to_come_ends_with_its_iterator() -> None:
    """Where replicas are not in sync, as while a straggler is excluded."""
    points = Noted()
    epochs = Epochs(points)
    iterator = iter(loader_of(3))
    next(iterator)
    epochs.stepped()
    points.replicas_in_sync = False
    for _ in loader_of(2):
        pass
    assert points.seen == [SyncPoint.EVALUATION]
    del iterator
    assert points.seen == [SyncPoint.EVALUATION, SyncPoint.EPOCH_END]


@pytest.mark.parametrize("new_batch", [True, False])
def test_an_epoch_that_goes_on_after_an_evaluation_ends_with_its_iterator(new_batch: bool) -> None:
    """A step may have a batch of an earlier one, or one that was fetched ahead."""
    points = Noted()
    epochs = Epochs(points)
    iterator = iter(loader_of(3))
    next(iterator)
    epochs.stepped()
    with torch.no_grad():
        assert sum(1 for _ in loader_of(2)) == 2
    if new_batch:
        next(iterator)
    epochs.stepped()
    assert points.seen == []
    del iterator
    assert points.seen == [SyncPoint.EPOCH_END]


def test_an_epoch_left_early_ends_where_persistent_workers_begin_another() -> None:
    points = Noted()
    epochs = Epochs(points)
    loader: Any = DataLoader(
        torch.zeros(4, 2), batch_size=1, num_workers=1, persistent_workers=True
    )
    next(iter(loader))
    epochs.stepped()
    points.replicas_in_sync = False
    iter(loader)
    assert points.seen == [SyncPoint.EVALUATION, SyncPoint.EPOCH_END]


@pytest.mark.parametrize("begun", ["here", "there"])
def test_a_loader_that_another_thread_iterates_ends_no_epoch(begun: str) -> None:
    """There a collective would meet one of the steps; so its end is unknown."""
    points = Noted()
    epochs = Epochs(points)
    for _ in range(2):
        batches: queue.Queue[Any] = queue.Queue(maxsize=1)
        iterator = iter(loader_of(6)) if begun == "here" else None

        def produce(iterator: Any = iterator, batches: queue.Queue[Any] = batches) -> None:
            for batch in iter(loader_of(6)) if iterator is None else iterator:
                batches.put(batch)
            batches.put(None)

        producer = threading.Thread(target=produce)
        producer.start()
        while batches.get() is not None:
            epochs.stepped()
            assert not epochs.seen and not epochs.at_end
        producer.join()
    del iterator
    epochs.stepped()
    assert not points.seen
    for _ in loader_of(3):
        epochs.stepped()
        assert epochs.seen, "that of this thread is known"
    assert points.seen == [SyncPoint.EPOCH_END]


def test_an_end_that_another_thread_sees_by_collection_waits_for_the_next_epoch() -> None:
    """In the middle of a step it would be another step than on other ranks."""
    points = Noted()
    epochs = Epochs(points)
    held = [iter(loader_of(3))]
    next(held[0])
    epochs.stepped()
    collecting = threading.Thread(target=held.clear)
    collecting.start()
    collecting.join()
    epochs.stepped()
    assert not points.seen
    iter(loader_of(2))
    assert points.seen == [SyncPoint.EPOCH_END]


def test_where_replicas_never_differ_nothing_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may begin an epoch of another loader in each step."""
    collected: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(None))
    counting = AlwaysInSync()
    epochs = Epochs(counting)
    for _ in loader_of(3):
        epochs.stepped()
        next(iter(loader_of(2)))
    assert not collected
    averaging = Points()
    others = Epochs(averaging)
    iterator = iter(loader_of(3))
    next(iterator)
    others.stepped()
    next(iter(loader_of(2)))
    assert collected
