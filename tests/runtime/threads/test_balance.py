"""Batches as large as ranks are fast, of ranks in threads, and other plans after it in mid-epoch.

A step's gradient is the mean over all samples that the ranks have in it, however these are split,
also where workers have prefetched batches that were split before a plan was changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from hvd_autosync.runtime.collectives.operations import CollectiveError, join, rank
from hvd_autosync.runtime.collectives.over_threads import RankDied, ThreadRanks
from hvd_autosync.runtime.patches.epochs import Epochs
from hvd_autosync.runtime.sync import phases
from hvd_autosync.runtime.sync.phase import Votes
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.sync_plan import SyncPlan

#: Samples of an equal batch; a slow rank has at least two.
_SIZE = 4
_RATE = 0.5
BALANCE = SyncPlan(protocol=Protocol(share=1.0, stragglers="balance"))


class Iterated:
    """As a loader's iterator, whose workers have some batches before the script.

    Args:
        loader: The loader.
        ahead: How many.
    """

    def __init__(self, loader: Any, ahead: int) -> None:
        self._sampler_iter: Iterator[list[int]] = iter(loader.batch_sampler)
        self._num_yielded = self._send_idx = 0
        self._with_workers: deque[list[int]] = deque()
        for _ in range(ahead):
            self._send()

    def _send(self) -> None:
        batch = next(self._sampler_iter, None)
        if batch is not None:
            self._with_workers.append(batch)
            self._send_idx += 1

    def batches(self, epochs: Epochs) -> Iterator[list[int]]:
        """All batches, as they are counted by ``epochs``."""
        while True:
            if not self._with_workers:
                self._send()
            if not self._with_workers:
                break
            batch = self._with_workers.popleft()
            self._send()
            self._num_yielded += 1
            epochs.on_batch(id(self), batch)
            yield batch
        epochs.on_exhausted(id(self))
        epochs.check()


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        seed: Of the order of turns.
        ahead: For each rank the batches that its workers have; also how many ranks there are.
        slow: The rank that needs three times as long for a sample. Under other plans than
            ``balance`` all steps take the same time: none handles a straggler.
        epochs: Batches of each epoch.
        changes: Number of a step -> the plan of later ones; the first plan is ``balance``.
    """

    seed: int
    ahead: tuple[int, ...]
    slow: int
    epochs: tuple[int, ...]
    changes: dict[int, SyncPlan] = field(hash=False)


@dataclass
class Seen:
    """What one rank has seen.

    Attributes:
        sizes: Of its batches.
        after: The parameter after each epoch.
    """

    sizes: list[int] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)


class Timer:
    """As ``ComputeTimer``, by a clock of the case.

    Attributes:
        of_ranks: Rank -> the seconds of its step.
    """

    of_ranks: ClassVar[dict[int, float]] = {}

    def waited(self, seconds: float) -> None:
        pass

    def stepped(self) -> float:
        return self.of_ranks[rank()]

    @property
    def seconds(self) -> float:
        return self.of_ranks[rank()]


@pytest.fixture(autouse=True)
def _votes_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Votes, "EVERY", 1)
    monkeypatch.setattr(phases, "ComputeTimer", Timer)


def samples(count: int) -> torch.Tensor:
    """Data of so many samples, whose sums are exact."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-8, 9, (count, 3), generator=generator).float()


def training(case: Case, begin: Any) -> Seen:
    ranks, seen, number = len(case.ahead), Seen(), 0
    own = begin([(3,)], BALANCE)
    for batches in case.epochs:
        data = samples(batches * _SIZE * ranks)
        sampler = DistributedSampler(data, ranks, rank(), shuffle=False)  # type: ignore[arg-type]
        loader = DataLoader(data, _SIZE, sampler=sampler)  # type: ignore[arg-type]
        epochs: Epochs = own.sync._progress.epochs
        iterator = Iterated(loader, case.ahead[rank()])
        epochs.on_begin(loader, iterator)
        for batch in iterator.batches(epochs):
            seen.sizes.append(len(batch))
            of_sample = 3.0 if rank() == case.slow else 1.0
            Timer.of_ranks[rank()] = len(batch) * of_sample if own.sync.plan == BALANCE else 1.0
            weight = torch.ones(3, requires_grad=True)
            torch.autograd.backward((weight * data[batch]).sum(1).mean())
            own.step({0: weight.grad})
            if number in case.changes:
                own.sync.switch(case.changes[number])
            number += 1
        own.sync.method.average()
        seen.after.append(own.values()[0])
    own.sync.method.before_sharing()
    join()
    return seen


def run(case: Case, begin: Any) -> list[Seen]:
    return ThreadRanks(len(case.ahead), seed=case.seed).run(lambda: training(case, begin))


def check(case: Case, seen: Sequence[Seen]) -> None:
    """Each step has used the mean of the samples that it has without ``balance``."""
    ranks, parameter, first = len(case.ahead), torch.ones(3), 0
    for epoch, batches in enumerate(case.epochs):
        data = samples(batches * _SIZE * ranks)
        for _ in range(batches):
            sizes = [each.sizes[first] for each in seen]
            assert sum(sizes) == _SIZE * ranks
            first += 1
        parameter -= _RATE * data.view(batches, -1, 3).mean(1).sum(0)
        for each in seen:
            assert torch.equal(each.after[epoch], seen[0].after[epoch]), "ranks differ"
        torch.testing.assert_close(seen[0].after[epoch], parameter, rtol=1e-5, atol=1e-4)


def plans() -> st.SearchStrategy[SyncPlan]:
    """Others, and ``balance`` itself."""
    sharded, lossless = ClassPlan("sharded"), ClassPlan(lossless=True)
    return st.sampled_from(
        [
            SyncPlan(),
            SyncPlan(ExchangePlan(1, rest=sharded)),
            SyncPlan(ExchangePlan(rest=lossless)),
            SyncPlan(schedule=Schedule(base=3)),
            SyncPlan(protocol=Protocol(share=1.0, stragglers="elastic")),
            BALANCE,
            BALANCE,
        ]
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ahead = tuple(draw(st.lists(st.integers(0, 5), min_size=2, max_size=4)))
    epochs = tuple(draw(st.lists(st.integers(6, 16), min_size=1, max_size=3)))
    changes = draw(st.dictionaries(st.integers(3, sum(epochs) - 1), plans(), max_size=5))
    slow = draw(st.integers(0, len(ahead) - 1))
    return Case(draw(st.integers(0, 10**6)), ahead, slow, epochs, changes)


@given(case=cases())
@settings(max_examples=40)
def test_any_plan_may_follow_and_precede_it(case: Case, begin: Any) -> None:
    check(case, run(case, begin))


@pytest.mark.parametrize("after", [SyncPlan(), BALANCE], ids=["another plan", "itself"])
def test_prefetched_batches_keep_their_weights(after: SyncPlan, begin: Any) -> None:
    """Workers of one rank have four of them when the plan is changed, those of the other none."""
    case = Case(1, (4, 0), 1, (16, 6), {8: after})
    seen = run(case, begin)
    check(case, seen)
    unequal = [
        number for number, (a, b) in enumerate(zip(*(s.sizes for s in seen), strict=True)) if a != b
    ]
    if after is BALANCE:
        assert {9, 10, 11, 12} <= {*unequal} and max(unequal) > 13, unequal
    else:
        assert min(unequal) < 8 and max(unequal) == 12, unequal


# A rank that was to die in a finalizer, which raises nothing, dies in its next operation.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["dies", "breaks"])
@given(case=cases(), at=st.integers(0, 150), which=st.integers(0, 3))
@settings(max_examples=20)
def test_failures_end_all_ranks(case: Case, at: int, which: int, kind: str, begin: Any) -> None:
    size = len(case.ahead)
    faults: Any = {"dies": {which % size: at}} if kind == "dies" else {"breaks_at": at}
    ranks = ThreadRanks(size, seed=case.seed, **faults)
    outcomes = ranks.outcomes(lambda: training(case, begin))
    failed = [each for each in outcomes if isinstance(each, BaseException)]
    assert len(failed) in (0, size)
    assert all(isinstance(each, (CollectiveError, RankDied)) for each in failed)
    assert not failed or ranks.failure
