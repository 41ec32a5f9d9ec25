"""The loss guard of ranks in threads: any losses, order of turns, absence and failure.

What it decides is compared with the tests of the losses themselves (``LossEnvelope``), applied to
the means over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.operations import CollectiveError, join, rank
from hvd_autosync.runtime.collectives.over_threads import RankDied, ThreadRanks
from hvd_autosync.runtime.guard import guard as module
from hvd_autosync.runtime.guard import handler
from hvd_autosync.runtime.guard.guard import Guard
from hvd_autosync.runtime.guard.loss_envelope import LossEnvelope
from hvd_autosync.runtime.measure.losses import Losses
from hvd_autosync.search_space.sync_plan import SyncPlan
from hvd_autosync.search_space.trial import LossPrediction

#: Windows are as short as this here.
_WINDOW = 4


@dataclass(frozen=True)
class Case:
    """The losses of a training.

    Attributes:
        ranks: How many.
        seed: Of the order of their turns.
        levels: The level of each window's losses.
        noise: The deviation of single losses.
        prediction: Whether the level of the first windows is predicted, and as what.
        steps: Rank -> how many steps it makes before it waits in ``join()``.
    """

    ranks: int
    seed: int
    levels: tuple[float, ...]
    noise: float
    prediction: float | None
    steps: tuple[int, ...]

    def loss(self, of_rank: int, step: int) -> float:
        """One loss; a multiple of 1/64, so that sums are exact."""
        generator = torch.Generator().manual_seed(self.seed + 1000 * of_rank + step)
        level = self.levels[step // _WINDOW]
        noise = self.noise * float(torch.randn(1, generator=generator))
        return level if math.isnan(level) else round(64 * (level + noise)) / 64

    def predicted(self) -> LossPrediction | None:
        """The prediction."""
        if self.prediction is None:
            return None
        levels = tuple(self.prediction + 0.05 * window for window in range(6))
        return LossPrediction(levels, (0.05,) * 6)


@st.composite
def cases(draw: st.DrawFn, *, uneven: bool = False) -> Case:
    ranks = draw(st.integers(2, 4))
    healthy = draw(st.integers(2, 16))
    levels = [1.0] * healthy
    levels += draw(st.sampled_from([[], [3.0] * 6, [1.2] * 8, [math.nan] * 4, [5.0, 1.0, 1.0]]))
    total = _WINDOW * len(levels)
    steps = tuple(total - (draw(st.integers(0, total // 2)) if uneven else 0) for _ in range(ranks))
    return Case(
        ranks,
        draw(st.integers(0, 10**6)),
        tuple(levels),
        draw(st.sampled_from([0.0, 0.05])),
        draw(st.sampled_from([None, None, 1.0, 0.8])),
        steps,
    )


@dataclass
class Seen:
    """What one rank's guard has done.

    Attributes:
        rejected_at: The step at which it did not accept the loss.
        verdict: Why.
        restored: The parameter after that, and the step of the snapshot.
    """

    rejected_at: int | None = None
    verdict: str = ""
    restored: tuple[float, int] | None = None


def training(case: Case, wrapped: Any, epoch: int = 1000) -> Seen:
    """Each step adds 1 to the only parameter; ranks join after each epoch of so many steps."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = wrapped([parameter], lr=1.0)
    guard, losses, seen = Guard("own", case.predicted()), Losses(), Seen()
    for step in range(case.steps[rank()]):
        losses.seen(torch.tensor(case.loss(rank(), step)))
        parameter.grad = torch.tensor([-1.0])
        optimizer.step()
        if not guard.stepped(losses):
            seen.rejected_at, seen.verdict = guard.step, guard.verdict
            step_restored = guard.restore(optimizer)
            seen.restored = parameter.item(), step_restored
            break
        if guard.wants_snapshot:
            guard.take_snapshot(optimizer)
        if (step + 1) % epoch == 0:
            join()
    join()
    return seen


def reference(case: Case) -> Seen:
    """The same from the means over ranks."""
    envelope, snapshots = LossEnvelope(case.predicted()), []
    for step in range(1, case.steps[0] + 1):
        window = step // _WINDOW - 2
        if step % _WINDOW == 0 and window >= 0:
            losses = [
                case.loss(each, _WINDOW * window + i)
                for each in range(case.ranks)
                for i in range(_WINDOW)
            ]
            wrong = envelope.accepts(math.fsum(losses) / len(losses), window)
            if wrong and snapshots:
                return Seen(step, wrong, (float(snapshots[0]), snapshots[0]))
        if not snapshots or step - snapshots[-1] >= 8 * _WINDOW:
            snapshots = [*snapshots, step][-2:]
    return Seen()


@given(case=cases(), epoch=st.sampled_from([3, 8, 21, 1000]))
@settings(max_examples=80)
def test_all_ranks_reject_what_the_means_of_all_losses_reject(
    case: Case, epoch: int, wrapped: Any, monkeypatch: Any
) -> None:
    """Also where they join after each epoch, for which none has missed a window."""
    monkeypatch.setattr(module, "LOSS_WINDOW", _WINDOW)
    seen = ThreadRanks(case.ranks, seed=case.seed).run(lambda: training(case, wrapped, epoch))
    assert seen == [reference(case)] * case.ranks


def test_ranks_keep_what_was_learned_together_or_not_at_all(wrapped: Any, monkeypatch: Any) -> None:
    """One rank knows the loss at the snapshot before it joins, the other does not."""
    monkeypatch.setattr(module, "LOSS_WINDOW", _WINDOW)
    predicted = LossPrediction((9.0, *(2.0,) * 9), (0.05,) * 10)

    def body() -> tuple[bool, bool]:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = wrapped([parameter], lr=1.0)
        guard, losses = Guard("own", predicted), Losses()

        def step(loss: float) -> bool:
            losses.seen(torch.tensor(loss))
            parameter.grad = torch.tensor([-1.0])
            optimizer.step()
            accepted = guard.stepped(losses)
            if not guard.step % 100 or guard.step == 1:
                guard.take_snapshot(optimizer)
            return accepted

        for _ in range(6 if rank() else 9):
            step(9.0 if guard.step < _WINDOW else 2.0)
        join()
        rejected = any(not step(4.0) for _ in range(10 * _WINDOW))
        return rejected, guard.keeps

    seen = ThreadRanks(2).run(body)
    assert seen[0] == seen[1] and seen[0][0]


@pytest.mark.parametrize("broken", [False, True])
def test_several_losses_may_rise_but_must_be_finite(
    broken: bool, wrapped: Any, monkeypatch: Any
) -> None:
    """One rank alone reports, which does not make the losses of the other comparable."""
    monkeypatch.setattr(module, "LOSS_WINDOW", _WINDOW)

    def body() -> str:
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        optimizer, other = (wrapped([each], lr=1.0) for each in parameters)
        guard, losses = Guard("own", LossPrediction((0.5,) * 6, (0.05,) * 6)), Losses()
        verdict = ""
        for step in range(20 * _WINDOW):
            losses.seen(torch.tensor(9.0))
            losses.stepped(other)
            losses.seen(torch.tensor(math.nan if broken and step == 50 else float(step)))
            losses.stepped(optimizer)
            if rank() == 0:
                losses.report(torch.tensor(1.0))
            if not guard.stepped(losses):
                verdict = guard.verdict
                break
            if guard.wants_snapshot:
                guard.take_snapshot(optimizer)
        join()
        return verdict

    for verdict in ThreadRanks(2).run(body):
        assert "not finite" in verdict if broken else not verdict


def test_a_step_of_a_strategy_optimizer_ends_its_loss(begin: Any, monkeypatch: Any) -> None:
    losses = Losses()
    monkeypatch.setattr(current, "losses", losses)

    def body() -> None:
        own = begin([(2,)], SyncPlan())
        for loss in (1.0, 2.0):
            losses.seen(torch.tensor(loss))
            own.step({0: torch.ones(2)})

    ThreadRanks(1).run(body)
    kept = losses.end_step(0)[0]
    assert kept is not None and float(kept) == 2.0


def test_several_losses_are_reported_once(monkeypatch: Any) -> None:
    losses, said = Losses(), list[str]()
    optimizers = [torch.optim.SGD([torch.ones(1)], lr=0.1) for _ in range(2)]
    method: Any = SimpleNamespace(round_steps=0, near_average=True, replicas_in_sync=False)
    monkeypatch.setattr(current, "losses", losses)
    monkeypatch.setattr(handler, "warn_on_rank_0", said.append)
    for _ in range(2):
        for optimizer in optimizers:
            losses.seen(torch.tensor(1.0))
            losses.stepped(optimizer)

    def body() -> None:
        for name in "ab":
            own = handler.LossGuardHandler()
            own.guard = Guard(name)
            own.loss()
            own.stepped(method, 1)
            assert own.healthy(2.0) and not own.healthy(math.inf)

    ThreadRanks(1).run(body)
    assert len(said) == 1 and "call hvd_autosync.report(loss)" in said[0]


@given(case=cases(uneven=True))
@settings(max_examples=80)
def test_no_rank_falls_back_alone(case: Case, wrapped: Any, monkeypatch: Any) -> None:
    """While some rank waits in ``join()``, the others may not fall back, because it could not."""
    monkeypatch.setattr(module, "LOSS_WINDOW", _WINDOW)
    assume(len(set(case.steps)) > 1)
    seen = ThreadRanks(case.ranks, seed=case.seed).run(lambda: training(case, wrapped))
    assert all(each == seen[0] for each in seen)
    if seen[0].rejected_at is not None:
        assert seen[0].rejected_at <= min(case.steps)


@given(case=cases(), at=st.integers(0, 20), which=st.integers(0, 3), dies=st.booleans())
@settings(max_examples=80)
def test_failures_end_all_ranks(
    case: Case, at: int, which: int, dies: bool, wrapped: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "LOSS_WINDOW", _WINDOW)
    faults: Any = {"dies": {which % case.ranks: at}} if dies else {"breaks_at": at}
    outcomes = ThreadRanks(case.ranks, seed=case.seed, **faults).outcomes(
        lambda: training(case, wrapped)
    )
    failed = [each for each in outcomes if isinstance(each, BaseException)]
    assert len(failed) in (0, case.ranks)
    assert all(isinstance(each, (CollectiveError, RankDied)) for each in failed)


def test_a_loss_that_is_no_number_counts_though_a_rank_is_away_most_of_the_time(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a straggler that others train without; both have the snapshot of the first step."""
    monkeypatch.setattr(module, "LOSS_WINDOW", _WINDOW)

    def body() -> bool:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = wrapped([parameter], lr=1.0)
        guard, losses = Guard("own"), Losses()
        for epoch in range(4):
            for _ in range(2 if rank() else 5 * _WINDOW):
                losses.seen(torch.tensor(math.nan if epoch else 1.0))
                parameter.grad = torch.tensor([-1.0])
                optimizer.step()
                if not guard.stepped(losses):
                    return True
                if guard.step == 1:
                    guard.take_snapshot(optimizer)
            join()
        return False

    assert ThreadRanks(2, seed=1).run(body) == [True, True]


def test_a_loss_that_rises_counts_though_a_rank_is_away_most_of_the_time(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No window is one of all ranks, and no epoch has as many as a level."""
    monkeypatch.setattr(module, "LOSS_WINDOW", _WINDOW)

    def body() -> int:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = wrapped([parameter], lr=1.0)
        guard, losses = Guard("own"), Losses()
        for epoch in range(20):
            for _ in range(2 if rank() else 4 * _WINDOW):
                losses.seen(torch.tensor(9.0 if epoch >= 10 else 1.0))
                parameter.grad = torch.tensor([-1.0])
                optimizer.step()
                if not guard.stepped(losses):
                    assert "risen to 9 from 1" in guard.verdict or rank()
                    return epoch
                if guard.step == 1:
                    guard.take_snapshot(optimizer)
            join()
        return -1

    assert ThreadRanks(2, seed=1).run(body) == [11, 11]


@pytest.mark.parametrize("loaded_at", [50, 8 * _WINDOW, 41])
@pytest.mark.parametrize("uneven", [False, True])
def test_after_a_checkpoint_was_loaded_the_loss_may_be_that_of_the_checkpoint(
    loaded_at: int, uneven: bool, wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 loads it, as scripts do. Nothing of what was discarded is restored later."""
    monkeypatch.setattr(module, "LOSS_WINDOW", _WINDOW)

    def body() -> tuple[int, int]:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = wrapped([parameter], lr=1.0)
        guard, losses = Guard("own", LossPrediction((1.0,) * 40, (0.05,) * 40)), Losses()
        for step in range(40 * _WINDOW):
            broken = step >= 30 * _WINDOW
            losses.seen(torch.tensor(math.nan if broken else 1.0 if step < loaded_at else 9.0))
            parameter.grad = torch.tensor([-1.0])
            optimizer.step()
            if not guard.stepped(losses):
                return guard.step, guard.restore(optimizer)
            if step + 1 == loaded_at:
                if rank() == 0:
                    guard.on_load()
                if uneven:
                    join()
            if guard.wants_snapshot:
                guard.take_snapshot(optimizer)
        return -1, -1

    steps, restored = zip(*ThreadRanks(2, seed=1).run(body), strict=True)
    assert steps[0] == steps[1] > 30 * _WINDOW
    assert restored[0] == restored[1] > loaded_at


def test_ranks_start_over_together_though_one_was_away_meanwhile(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOSS_WINDOW", _WINDOW)

    def body() -> list[int]:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = wrapped([parameter], lr=1.0)
        predicted = LossPrediction((1.0,) * 60, (0.05,) * 60)
        guard, losses, rejected = Guard("own", predicted), Losses(), []
        for epoch in range(4):
            for step in range(10 * _WINDOW if rank() or epoch != 1 else 2):
                losses.seen(torch.tensor(9.0 if epoch else 1.0))
                parameter.grad = torch.tensor([-1.0])
                optimizer.step()
                if epoch == 1 and step == 5:
                    guard.on_load()  # on the rank that goes on
                if not guard.stepped(losses):
                    rejected.append(epoch)
                elif guard.wants_snapshot:
                    guard.take_snapshot(optimizer)
            join()
        return rejected

    assert ThreadRanks(2, seed=1).run(body) == [[], []]


@pytest.mark.parametrize("steps", [1, 3])
def test_less_than_half_a_window_is_tested_for_numbers_alone(
    steps: int, wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of few losses varies more, as right after steps without a barrier."""
    monkeypatch.setattr(module, "LOSS_WINDOW", _WINDOW)

    def body() -> bool:
        optimizer = wrapped([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        guard, losses = Guard("own"), Losses()
        guard.take_snapshot(optimizer)
        for _ in range(10 * _WINDOW):
            losses.seen(torch.tensor(1.0))
            assert guard.stepped(losses)
        # The mean of the steps of all, and a step of the rank that has made the most.
        guard.on_quiescent(guard.step + _WINDOW - steps, waiting=True)
        for _ in range(steps):
            losses.seen(torch.tensor(9.0))
            assert guard.stepped(losses)
        accepted = True
        for _ in range(3 * _WINDOW):
            losses.seen(torch.tensor(1.0))
            accepted = accepted and guard.stepped(losses)
        return accepted

    assert ThreadRanks(2, seed=1).run(body) == [steps == 1] * 2


def test_ranks_with_lower_losses_that_go_on_alone_make_no_level_for_all(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have other data. All again are judged by all."""
    monkeypatch.setattr(module, "LOSS_WINDOW", _WINDOW)

    def body() -> bool:
        optimizer = wrapped([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        guard, losses = Guard("own"), Losses()
        guard.take_snapshot(optimizer)
        accepted = True
        for _ in range(3):
            for _ in range(8 * _WINDOW if rank() else 20 * _WINDOW):
                losses.seen(torch.tensor(3.0 if rank() else 1.0))
                accepted = accepted and guard.stepped(losses)
            join()
        return accepted

    assert ThreadRanks(2, seed=1).run(body) == [True, True]


@pytest.mark.parametrize("rises", ["at the switch", "after the phase", ""])
def test_steps_without_a_barrier_are_judged_by_the_level_before(
    rises: str, wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that jumps there and stays is no new level; likewise at the end of the phase."""
    monkeypatch.setattr(module, "LOSS_WINDOW", _WINDOW)

    def body() -> str:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = wrapped([parameter], lr=1.0)
        guard, losses = Guard("own"), Losses()

        def steps(loss: float) -> str:
            for _ in range(10 * _WINDOW):
                losses.seen(torch.tensor(loss))
                parameter.grad = torch.tensor([-1.0])
                optimizer.step()
                if not guard.stepped(losses):
                    return guard.verdict
                if guard.wants_snapshot:
                    guard.take_snapshot(optimizer)
            return ""

        assert not steps(1.0)
        guard.on_quiescent(guard.step, waiting=True)
        if rank() == 0:  # which has the losses of all
            for _ in range(2 * 10 * _WINDOW):
                if not guard.accepts_one(9.0 if rises == "at the switch" else 1.0):
                    return guard.verdict
        elif rises == "at the switch":
            return ""
        guard.on_quiescent(guard.step + 10 * _WINDOW, waiting=True)
        return steps(9.0 if rises else 1.0)

    first, second = ThreadRanks(2, seed=1).run(body)
    said = "risen to 9 from 1" if rises else ""
    assert said in first and bool(first) is bool(rises)
    assert second == ("" if rises == "at the switch" else first)


@pytest.mark.parametrize(("epoch", "restored"), [(2, 0), (9, 9 * _WINDOW)])
def test_a_snapshot_that_is_old_enough_is_restored_though_it_is_the_newest(
    epoch: int, restored: int, wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a barrier there is one after each epoch alone, which may be thousands of steps."""
    monkeypatch.setattr(module, "LOSS_WINDOW", _WINDOW)

    def body() -> int:
        optimizer = wrapped([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        guard = Guard("own")
        for step in (0, epoch * _WINDOW, 2 * epoch * _WINDOW):
            guard.on_quiescent(step, waiting=False)
            if step < 2 * epoch * _WINDOW:
                guard.take_snapshot(optimizer)
        return guard.restore(optimizer)

    assert ThreadRanks(2, seed=1).run(body) == [restored, restored]


@pytest.mark.parametrize("alone", [False, True])
def test_ranks_fall_back_once_all_are_there_to_what_all_have(
    alone: bool, wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where one joins again before its first step, nor to what one has kept meanwhile."""
    monkeypatch.setattr(module, "LOSS_WINDOW", _WINDOW)
    steps = [(1, 1), (5 * _WINDOW, 0), (2, 0), (2, 2)]

    def body() -> tuple[int, int, float]:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = wrapped([parameter], lr=1.0)
        guard, losses = Guard("own"), Losses()
        for epoch, of_ranks in enumerate(steps):
            for at in range(of_ranks[rank()]):
                losses.seen(torch.tensor(math.nan if epoch else 1.0))
                parameter.grad = torch.tensor([-1.0])
                optimizer.step()
                if not guard.stepped(losses):
                    return epoch, guard.restore(optimizer), parameter.item()
                if guard.step == 1 or (alone and (epoch, at) == (1, 1)):
                    guard.take_snapshot(optimizer)
            join()
        return -1, 0, math.nan

    assert ThreadRanks(2, seed=1).run(body) == [(3, 1, 1.0)] * 2
