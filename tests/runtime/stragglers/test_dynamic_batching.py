"""How batches are cut for ranks that are not equally fast."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hvd_autosync.runtime.patches.epochs import Epochs, SyncPoint
from hvd_autosync.runtime.stragglers.batch_split import cut_sizes
from hvd_autosync.runtime.stragglers.dynamic_batching import DynamicBatching

VOTES = 3


def limits(samples: int, ranks: int) -> tuple[int, int]:
    whole = samples // ranks
    return min(whole, max(2, -(-whole // 4))), 2 * -(-samples // ranks)


@given(st.lists(st.floats(0.05, 20.0), min_size=1, max_size=4), st.integers(0, 30))
def test_sizes_are_whole_and_within_their_limits(speeds: list[float], more: int) -> None:
    samples = len(speeds) + more
    least, most = limits(samples, len(speeds))
    found = cut_sizes(samples, tuple(speeds))
    assert sum(found) == samples
    assert least <= min(found) and max(found) <= most


@given(st.lists(st.floats(0.3, 1.0), min_size=2, max_size=3), st.integers(0, 9))
def test_no_other_sizes_are_ready_sooner(speeds: list[float], more: int) -> None:
    samples = len(speeds) + more
    least, most = limits(samples, len(speeds))
    found = cut_sizes(samples, tuple(speeds))
    if len(set(speeds)) == 1:
        assert max(found) - min(found) <= 1
        return

    def ready(counts: tuple[int, ...]) -> float:
        return max(count / speed for count, speed in zip(counts, speeds, strict=True))

    every = itertools.product(range(least, most + 1), repeat=len(speeds))
    best = min(ready(each) for each in every if sum(each) == samples)
    assert ready(found) == pytest.approx(best)


class OwnPasses:
    """The passes of one of several ranks in this process, which would see those of all."""

    def __init__(self) -> None:
        self.iterators: list[Any] = []
        self.used = 0
        self.last_iterators: list[Any] = []

    def call_on_begin(self, begun: Callable[[Any, Any], None]) -> None:
        self.begun = weakref.WeakMethod(begun)

    def begin(self, loader: Any) -> Any:
        iterator = iter(loader)
        if (begun := self.begun()) is not None:
            begun(loader, iterator)
        self.iterators, self.used = [iterator], 0
        return iterator

    def stepped(self) -> None:
        self.last_iterators = self.next_iterators
        self.used = self.iterators[0]._num_yielded

    @property
    def next_iterators(self) -> list[Any]:
        return [each for each in self.iterators if each._num_yielded > self.used]


class Rank:
    """One rank, as far as its batches go."""

    def __init__(self, rank: int, ranks: int, loader: Any) -> None:
        self.passes = OwnPasses()
        self.part = DynamicBatching(rank, ranks, self.passes)  # type: ignore[arg-type]
        self.loader = loader
        self.again()

    def again(self) -> None:
        """The next pass of the same loader."""
        self.iterator = self.passes.begin(self.loader)

    def end_workers(self) -> None:
        """End them now: where a collection in another test's fork does, each takes five seconds."""
        if isinstance(self.iterator, _MultiProcessingDataLoaderIter):
            self.iterator._shutdown_workers()

    def batch(self) -> list[int]:
        return list(next(self.iterator))

    def step(self, seconds: float = 1.0) -> list[int]:
        """A step of one batch; a sample takes so long."""
        batch = self.batch()
        self.passes.stepped()
        self.part.stepped(seconds * len(batch))
        return batch


def loader_of(rank: int, ranks: int, samples: int, size: int, **options: Any) -> Any:
    names = ("shuffle", "drop_last", "seed")
    kept = {name: options.pop(name) for name in names if name in options}
    data = list(range(samples))
    sampler = DistributedSampler(data, ranks, rank, **kept)  # type: ignore[arg-type]
    return DataLoader(data, batch_size=size, sampler=sampler, collate_fn=list, **options)  # type: ignore[arg-type]


def job(ranks: int, samples: int, size: int, **options: Any) -> list[Rank]:
    return [Rank(r, ranks, loader_of(r, ranks, samples, size, **options)) for r in range(ranks)]


def vote(job: Sequence[Rank], times: int = VOTES) -> None:
    for _ in range(times):
        votes = [rank.part.vote() for rank in job]
        for rank in job:
            rank.part.voted(votes)


def lengths(job: Sequence[Rank]) -> list[int]:
    return [len(rank.step()) for rank in job]


def check(job: Sequence[Rank], plain: Iterator[int]) -> None:
    """All ranks' next batches are the next samples of the data, weighted by what they have."""
    batches = [rank.batch() for rank in job]
    total = sum(map(len, batches))
    assert sorted(itertools.chain(*batches)) == sorted(itertools.islice(plain, total))
    for rank, batch in zip(job, batches, strict=True):
        assert rank.part.weight() == pytest.approx(len(batch) * len(job) / total)
    for rank, batch in zip(job, batches, strict=True):
        rank.passes.stepped()
        slow = 4.0 if rank is job[-1] else 1.0
        rank.part.stepped(slow * len(batch))


@pytest.fixture(autouse=True)
def _every_rank_is_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all ranks are in one process."""
    monkeypatch.setattr(DynamicBatching, "_is_newest", lambda self: True)


@given(
    ranks=st.integers(1, 4),
    samples=st.integers(60, 200),
    size=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_all_ranks_together_have_the_same_samples_in_every_step(
    ranks: int, samples: int, size: int, shuffle: bool, drop_last: bool
) -> None:
    ours = job(ranks, samples, size, shuffle=shuffle, drop_last=drop_last)
    for number in range(2):
        (whole,) = job(1, samples, size, shuffle=shuffle, drop_last=drop_last)
        order = list(whole.loader.sampler)
        missing = -len(order) % ranks
        if drop_last and missing:
            order = order[: len(order) // ranks * ranks]
        else:
            order += order[:missing]
        plain = iter(order)
        for step in range(len(ours[0].loader)):
            check(ours, plain)
            if step % 8 == 7:
                vote(ours, 1)
        assert next(plain, None) is None
        assert [next(rank.iterator, None) for rank in ours] == [None] * ranks
        if number == 0:
            for rank in ours:
                rank.again()


def test_a_slow_rank_has_smaller_batches_after_three_votes_and_keeps_them() -> None:
    ours = job(4, 800, 8)
    for rank, seconds in zip(ours, (1.0, 1.0, 1.0, 4.0), strict=True):
        rank.step(seconds)
    vote(ours, VOTES - 1)
    assert [*lengths(ours[:3]), len(ours[3].step(4.0))] == [8] * 4, "too early"
    vote(ours, 1)
    assert lengths(ours) == [10, 10, 10, 2]
    for rank in ours:
        rank.again()
    assert lengths(ours) == [10, 10, 10, 2], "also in the next pass"
    for _ in range(10):  # it has recovered
        lengths(ours)
    vote(ours)
    assert lengths(ours) == [8] * 4


def test_the_message_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    ours = job(2, 800, 8)
    for rank, seconds in zip(ours, (1.0, 3.0), strict=True):
        rank.step(seconds)
    vote(ours, 2 * VOTES)
    assert capfd.readouterr().err == "hvd-autosync: ranks take 12, 4 of a step's 16 samples\n"


def test_noise_changes_nothing() -> None:
    ours = job(2, 800, 8)
    for seconds in ((1.0, 1.3), (1.3, 1.0), (1.0, 1.0)) * 5:
        for rank, own in zip(ours, seconds, strict=True):
            for _ in range(3):
                rank.step(own)
        vote(ours, 1)
    assert lengths(ours) == [8, 8]


@pytest.mark.parametrize("workers", [(2, 2), (1, 0), (0, 2)])
def test_batches_that_workers_already_have_stay_as_they_are(workers: tuple[int, int]) -> None:
    """Ranks may have different numbers of workers, who have their batches early."""
    loaders = [loader_of(r, 2, 200, 4, shuffle=False, num_workers=workers[r]) for r in range(2)]
    ours = [Rank(rank, 2, loader) for rank, loader in enumerate(loaders)]
    ahead = 2 * max(workers)
    for _ in range(2):
        plain = iter(range(200))
        for step in range(25):
            check(ours, plain)
            if step % 8 == 7:
                vote(ours, VOTES)
        for rank in ours:
            rank.end_workers()
            rank.again()
    sizes = [lengths(ours) for _ in range(ahead + 2)]
    assert sizes == [[4, 4]] * ahead + [[6, 2]] * 2
    for rank in ours:
        rank.end_workers()


def test_ranks_that_missed_votes_start_again_together() -> None:
    ours = job(2, 800, 8)
    for rank, seconds in zip(ours, (1.0, 3.0), strict=True):
        rank.step(seconds)
    vote(ours, VOTES - 1)
    ours[0].part.voted([ours[0].part.vote(), [0.0] * 5])  # the other one waits in join()
    vote(ours, 1)
    vote(ours, VOTES - 1)
    both = [len(rank.step(own)) for rank, own in zip(ours, (1.0, 3.0), strict=True)]
    assert both == [8, 8], "what only one of them knows must not decide"
    vote(ours, 1)
    assert lengths(ours) == [12, 4]
    ours[0].part.speeds = (1.0, 2.0)  # however it has come about
    vote(ours, 1)
    assert lengths(ours) == [8, 8]


@pytest.mark.parametrize("other", [{"seed": 7}, {"batch_size": 4}, {"samples": 790}])
def test_ranks_whose_data_differ_are_left_alone(
    other: dict[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    different = {"samples": 800, "seed": 0, "batch_size": 8} | other
    loaders = [
        loader_of(0, 2, 800, 8),
        loader_of(1, 2, different["samples"], different["batch_size"], seed=different["seed"]),
    ]
    ours = [Rank(rank, 2, loader) for rank, loader in enumerate(loaders)]
    for rank, seconds in zip(ours, (1.0, 3.0), strict=True):
        rank.step(seconds)
    vote(ours, 10)
    assert lengths(ours) == [8, different["batch_size"]]
    assert capfd.readouterr().err.count("batches keep their sizes") == 1


class SyncPoints:
    """No rounds, as for a training whose parameters are always the same on all ranks."""

    replicas_in_sync = True

    def at_sync_point(self, why: SyncPoint) -> None:
        raise AssertionError(why)


@pytest.mark.parametrize("kind", ["no sampler", "evaluation", "two loaders", "training"])
def test_other_loops_are_left_alone(kind: str) -> None:
    loader = loader_of(0, 2, 100, 4)
    if kind == "no sampler":
        loader = DataLoader(list(range(100)), batch_size=4)  # type: ignore[arg-type]
    rounds = SyncPoints()
    passes = Epochs(rounds)
    part = DynamicBatching(0, 2, passes)
    with torch.set_grad_enabled(kind != "evaluation"):
        iterator = iter(loader)
    other = iter(loader)
    next(iterator)
    if kind == "two loaders":
        next(other)
    passes.stepped()
    part.stepped(1.0)
    assert (part.vote() == [0.0] * 5) == (kind != "training")
    assert part.weight() == 1.0


def test_a_batch_of_another_loop_counts_as_it_is() -> None:
    rounds = SyncPoints()
    passes = Epochs(rounds)
    part = DynamicBatching(0, 2, passes)
    iterator = iter(loader_of(0, 2, 800, 8))
    for batches in range(2):
        next(iterator)
        passes.stepped()
        part.stepped(1.0)
        for _ in range(VOTES if batches == 0 else 0):
            vote = part.vote()
            part.voted([vote, [vote[0] / 3, *vote[1:]]])
    assert len(next(iterator)) == 12 and part.weight() == 1.5
    passes.stepped()
    looked_at = iter(DataLoader(torch.arange(8), batch_size=8))
    next(looked_at)
    assert part.weight() == 1.0


def test_batches_are_equal_again_from_a_number_on() -> None:
    ours = job(2, 800, 8)
    for rank, seconds in zip(ours, (1.0, 3.0), strict=True):
        rank.step(seconds)
    vote(ours)
    first = max(rank.part.planned for rank in ours)
    for rank in ours:
        rank.part.end(first)
    assert lengths(ours) == [8, 8]


def test_an_iterator_keeps_what_weighs_its_batches() -> None:
    """As long as workers have batches of unequal sizes; then nothing is left of it."""
    loaders = [loader_of(rank, 2, 400, 4, num_workers=1 - rank) for rank in range(2)]
    ours = [Rank(rank, 2, loader) for rank, loader in enumerate(loaders)]
    for rank, seconds in zip(ours, (1.0, 3.0), strict=True):
        rank.step(seconds)
    vote(ours)
    for _ in range(4):
        lengths(ours)
    first = max(rank.part.planned for rank in ours)
    left = [weakref.ref(rank.part) for rank in ours]
    for rank in ours:
        rank.part.end(first)
        del rank.part
    for number in range(5, first + 1):
        own = [(len(rank.batch()), each()) for rank, each in zip(ours, left, strict=True)]
        for size, part in own:
            assert part is not None and part.weight() == size / 4
            assert (size != 4) == (number < first)
        del own, part
        for rank in ours:
            rank.passes.stepped()
    assert first > 6 and [each() for each in left] == [None, None]
    for rank in ours:
        rank.again()
    assert [len(rank.batch()) for rank in ours] == [4, 4]


def test_a_later_instance_times_its_own_steps_only() -> None:
    """Others were made in between, under another plan."""
    (own,) = job(1, 800, 8)
    own.step()
    own.part.end(own.part.planned)
    for _ in range(3):
        own.batch()
        own.passes.stepped()
    own.part = DynamicBatching(0, 1, own.passes)  # type: ignore[arg-type]
    own.step(seconds=0.5)
    speed, planned, *_ = own.part.vote()
    assert (speed, planned) == (2.0, 5)
