"""Whether a lossy strategy is as good: what is tried, in which order, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from hvd_autosync.quality import SEEDS, QualityCheck, QualityTrial, Verdict, losses_of
from hvd_autosync.search_space import RankReport, Strategy, TrialResult, TrialStatus

DEFAULT, FAST, SAFE = (Strategy({"codec": name}) for name in ("none", "topk", "fp16"))
Curve = Callable[[int], float]


def falling(end: float, steps: int = 100) -> tuple[float, ...]:
    return tuple(end + math.exp(-step / 10) for step in range(steps))


def check(
    curves: dict[tuple[Strategy, int], tuple[float, ...]], candidates: Sequence[Strategy]
) -> QualityCheck:
    trials = [QualityTrial(s, seed, losses) for (s, seed), losses in curves.items()]
    return QualityCheck(DEFAULT, candidates, trials)


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
    running = QualityCheck(DEFAULT, [FAST], [QualityTrial(DEFAULT, 0, running=True)])
    assert running.next() == (DEFAULT, 1)
    assert running.verdicts() == []


def test_losses_are_means_of_the_ranks() -> None:
    ranks = (RankReport(0, "a", losses=(1.0, 2.0, 9.0)), RankReport(1, "b", losses=(3.0, 4.0)))
    assert losses_of(TrialResult(TrialStatus.COMPLETED, ranks=ranks)) == (2.0, 3.0)
    assert losses_of(TrialResult(TrialStatus.CRASHED, ranks=ranks)) == ()
    assert losses_of(TrialResult(TrialStatus.COMPLETED)) == ()
    blind = (*ranks, RankReport(2, "b"))
    assert losses_of(TrialResult(TrialStatus.COMPLETED, ranks=blind)) == ()
