"""Whether a lossy strategy is as good: what is tried, in which order, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hvd_autosync.quality import (
    SEEDS,
    QualityCheck,
    QualityTrial,
    Verdict,
    loss_ceilings,
    losses_of,
)
from hvd_autosync.search_space import RankReport, Strategy, TrialResult, TrialStatus

DEFAULT, FAST, SAFE = (Strategy({"codec": name}) for name in ("none", "topk", "fp16"))
Curve = Callable[[int], float]


def falling(end: float, steps: int = 100) -> tuple[float, ...]:
    return tuple(end + math.exp(-step / 10) for step in range(steps))


def check(
    curves: dict[tuple[Strategy, int], tuple[float, ...]], candidates: Sequence[Strategy]
) -> QualityCheck:
    trials = [QualityTrial(s, seed, losses) for (s, seed), losses in curves.items()]
    return QualityCheck(DEFAULT, candidates, trials, first_until_one_may)


def first_until_one_may(
    untried: Sequence[Strategy], verdicts: Sequence[Verdict]
) -> Strategy | None:
    return None if any(verdict.admissible for verdict in verdicts) else untried[0]


BASE = {(DEFAULT, seed): falling(1.0 + 0.01 * seed) for seed in SEEDS}


def verdict(losses: tuple[float, ...]) -> Verdict:
    (found,) = check({**BASE, (FAST, 0): losses}, [FAST]).verdicts()
    return found


def test_the_order_of_trials() -> None:
    curves: dict[tuple[Strategy, int], tuple[float, ...]] = {}
    asked = []
    while (wanted := check(curves, [FAST, SAFE]).next()) is not None:
        asked.append(wanted)
        curves[wanted] = falling(2.0 if wanted[0] == FAST else 1.0)
    assert asked == [(DEFAULT, 0), (DEFAULT, 1), (DEFAULT, 2), (FAST, 0), (SAFE, 0)]
    verdicts = check(curves, [FAST, SAFE]).verdicts()
    assert [(v.strategy, v.admissible) for v in verdicts] == [(FAST, False), (SAFE, True)]


def test_who_is_chosen_is_tried_after_the_verdicts_so_far() -> None:
    seen = []

    def last(untried: Sequence[Strategy], verdicts: Sequence[Verdict]) -> Strategy:
        seen.append(([v.strategy for v in verdicts], list(untried)))
        return untried[-1]

    trials = [QualityTrial(s, seed, losses) for (s, seed), losses in BASE.items()]
    assert QualityCheck(DEFAULT, [FAST, SAFE], trials, last).next() == (SAFE, 0)
    trials.append(QualityTrial(SAFE, 0, falling(1.0)))
    assert QualityCheck(DEFAULT, [FAST, SAFE], trials, last).next() == (FAST, 0)
    assert seen == [([], [FAST, SAFE]), ([SAFE], [FAST])]


def test_how_far_above_the_default_a_loss_is() -> None:
    assert verdict(falling(1.0)).excess == pytest.approx(0.0, abs=1e-6)
    assert verdict(falling(1.06)).excess == pytest.approx(2.0, abs=0.1)
    assert verdict((math.nan,) * 100).excess == math.inf
    slow = tuple(1.0 + math.exp(-step / 40) for step in range(300))
    assert verdict(slow).excess == 1.0  # it may be used, for it comes there in time


def test_the_first_that_may_be_used_is_enough() -> None:
    curves = {**BASE, (FAST, 0): falling(1.0)}
    assert check(curves, [FAST, SAFE]).next() is None
    assert [v.strategy for v in check(curves, [FAST, SAFE]).verdicts()] == [FAST]


def test_nothing_lossy_nothing_to_judge() -> None:
    assert check({}, []).next() is None and check({}, []).verdicts() == []


@pytest.mark.parametrize(
    ("losses", "admissible"),
    [
        (falling(1.0), True), (falling(0.5), True),
        (falling(1.025), True),  # within two deviations of the seeds and a tolerance
        (falling(1.05), False), ((math.nan,) * 100, False), ((), False), (falling(1.0, 10), False),
    ],
)  # fmt: skip
def test_verdicts(losses: tuple[float, ...], admissible: bool) -> None:
    found = verdict(losses)
    assert found.admissible == admissible and found.reason
    assert found.default_loss == pytest.approx(1.0, abs=0.01)
    assert found.allowed == pytest.approx(0.03, abs=0.001)


def test_more_steps_in_the_same_time_may_make_up_for_worse_ones() -> None:
    slow = tuple(1.0 + math.exp(-step / 40) for step in range(300))
    assert not verdict(slow[:100]).admissible
    found = verdict(slow)
    assert found.admissible and "in time" in found.reason


def test_without_losses_nobody_is_judged() -> None:
    blind = check({(DEFAULT, 0): ()}, [FAST, SAFE])
    assert blind.next() is None
    assert [v.admissible for v in blind.verdicts()] == [False, False]
    assert "hvd_autosync.report" in blind.verdicts()[0].reason


def test_nothing_is_decided_while_a_trial_runs() -> None:
    trials = [QualityTrial(DEFAULT, 0, running=True)]
    running = QualityCheck(DEFAULT, [FAST], trials, first_until_one_may)
    assert running.next() == (DEFAULT, 1)
    assert running.verdicts() == []


def test_losses_are_means_of_the_ranks() -> None:
    ranks = (RankReport(0, "a", losses=(1.0, 2.0, 9.0)), RankReport(1, "b", losses=(3.0, 4.0)))
    assert losses_of(TrialResult(TrialStatus.COMPLETED, ranks=ranks)) == (2.0, 3.0)
    assert losses_of(TrialResult(TrialStatus.CRASHED, ranks=ranks)) == ()
    assert losses_of(TrialResult(TrialStatus.COMPLETED)) == ()
    blind = (*ranks, RankReport(2, "b"))
    assert losses_of(TrialResult(TrialStatus.COMPLETED, ranks=blind)) == ()


def test_ceilings_follow_the_default_with_room_for_noise() -> None:
    seeds = [[2.0 - step / 320 + 0.01 * seed for step in range(320)] for seed in SEEDS]
    ceilings = loss_ceilings(seeds)
    assert len(ceilings) == 10 and list(ceilings) == sorted(ceilings, reverse=True)
    # 6 deviations of the seeds are 0.06, 5 % are 0.1.
    assert ceilings[0] == pytest.approx((2.01 - 16 / 320) * 1.05, rel=0.01)
    assert ceilings[-1] == pytest.approx(1.01 + 16 / 320 + 0.06, rel=0.01)


@pytest.mark.parametrize("slower", [1.2, 1.5, 2.0, 3.0])
def test_who_was_judged_may_be_as_slow_again_and_nobody_else(slower: float) -> None:
    def curve(steps: int, factor: float) -> list[float]:
        return [0.3 + 2 * math.exp(-step / 80 / factor) for step in range(steps)]

    seeds, own = [curve(192, 1.0) for _ in SEEDS], curve(320, slower)
    means = [sum(own[i : i + 32]) / 32 for i in range(0, 320, 32)]
    judged = loss_ceilings(seeds, own)
    assert len(judged) == 10
    assert all(mean <= top for mean, top in zip(means, judged, strict=True))
    assert any(mean > top for mean, top in zip(means, loss_ceilings(seeds), strict=False))


def test_noisy_seeds_raise_the_ceilings() -> None:
    quiet, noisy = ([[1.0 + scale * seed] * 64 for seed in SEEDS] for scale in (0.001, 0.1))
    assert loss_ceilings(quiet)[0] == pytest.approx(1.05, abs=0.01)
    assert loss_ceilings(noisy)[0] == pytest.approx(1.1 + 0.6, abs=0.01)


@pytest.mark.parametrize(
    "trials", [[], [[1.0] * 64], [[1.0] * 64, [1.0] * 31], [[1.0] * 64, [math.nan] * 64]]
)
def test_too_little_gives_no_ceilings(trials: list[list[float]]) -> None:
    assert loss_ceilings(trials) == ()


def local(losses: tuple[float, ...], round_steps: int) -> Verdict:
    """The verdict of a strategy of local steps, beside a default with some noise."""
    trials = [QualityTrial(DEFAULT, seed, noisy(1.0, seed)) for seed in SEEDS]
    trials.append(QualityTrial(FAST, 0, losses, round_steps=round_steps))
    (found,) = QualityCheck(DEFAULT, [FAST], trials, first_until_one_may).verdicts()
    return found


def noisy(end: float, seed: int, steps: int = 200) -> tuple[float, ...]:
    noise = np.random.default_rng(seed).normal(0, 0.05, steps)
    return tuple(end + math.exp(-step / 10) + float(noise[step]) for step in range(steps))


@pytest.mark.parametrize("round_steps", [2, 8, 16, 64])
def test_replicas_that_are_as_good_together_may_train_apart(round_steps: int) -> None:
    assert all(local(noisy(1.0, seed, 400), round_steps).admissible for seed in range(10, 30))


@pytest.mark.parametrize("round_steps", [8, 16, 64, 150])
def test_replicas_whose_average_is_bad_may_not(round_steps: int) -> None:
    """Their own losses are as good as the default's in all steps but the first of each round."""
    losses = list(noisy(0.97, 10, 400))
    for step in range(round_steps, 400, round_steps):
        losses[step] += 1.0
    found = local(tuple(losses), round_steps)
    assert not found.admissible and "average" in found.reason
    assert found.excess >= 2.0  # although its own loss is low


def test_losses_of_the_default_that_are_no_numbers_judge_nobody() -> None:
    curves = {**BASE, (DEFAULT, 1): (*falling(1.0)[:-1], math.inf), (FAST, 0): falling(1.0)}
    (found,) = check(curves, [FAST]).verdicts()
    assert not found.admissible and "no numbers" in found.reason


def test_nobody_worth_judging_costs_no_trial() -> None:
    assert QualityCheck(DEFAULT, [FAST], [], lambda untried, verdicts: None).next() is None


def test_a_round_that_is_longer_than_the_defaults_trial() -> None:
    losses = list(noisy(1.0, 10, 1000))
    assert local(tuple(losses), 500).admissible
    losses[500] += 1.0
    assert not local(tuple(losses), 500).admissible
