"""The losses that ``benchmarks/noninferiority.py`` and ``benchmarks/guard_alarms.py`` simulate."""

from __future__ import annotations

import statistics
import sys
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import guard_alarms
import noninferiority
from noninferiority import Cell, Trainings

from hvd_autosync.study.loss_prediction import predict_losses
from hvd_autosync.study.quality_trial import fall_of


def test_the_tolerance_of_guarded_trainings_is_that_of_their_prediction() -> None:
    """An unjudged strategy may be above the default by half of it."""
    trainings = guard_alarms.Trainings("normal", guard_alarms.dice_of("", "", 0.0))
    trials = [trainings.losses(guard_alarms.TRIAL_STEPS).tolist() for _ in range(64)]
    steps = guard_alarms.LOSS_WINDOW
    means = [statistics.fmean(loss for losses in trials for loss in losses[:steps])]
    margin = predict_losses(trials).levels[0] - means[0]
    assert margin == pytest.approx(guard_alarms.TOLERANCE / 2, rel=0.05)


def test_no_two_cells_of_guarded_trainings_have_the_same_noise() -> None:
    cells = product(("forced", "admitted"), ("normal", "heavy"), (0.0, 0.5, 10.0))
    firsts = sorted(guard_alarms.dice_of(*cell).random() for cell in cells)
    assert all(after - before > 1e-9 for before, after in pairwise(firsts))


def differences(cell: Cell, count: int = 60) -> np.ndarray:
    """Mean differences of pairs over the judged steps, in tolerances."""
    trainings = Trainings(cell, 0)
    last = noninferiority.STEPS // 4
    tolerance = trainings._difference / cell.difference
    pairs = ((trainings.losses(0, seed), trainings.losses(None, seed)) for seed in range(count))
    return np.array([np.mean(np.subtract(a, b)[-last:]) / tolerance for a, b in pairs])


def test_no_two_cells_of_judged_candidates_have_the_same_noise() -> None:
    kinds = [Cell("candidate", kind, 1.0, 1.0) for kind in noninferiority.KINDS]
    others = [
        Cell("candidate", "normal", 0.25, 1.0),
        Cell("candidate", "normal", 1.0, 2.0),
        Cell("candidate", "normal", 1.0, 1.0, 0.1),
        Cell("study", "normal", 1.0, 1.0),
    ]
    correlations = np.corrcoef([differences(cell) for cell in (*kinds, *others)])
    assert np.abs(np.triu(correlations, 1)).max() < 0.5


@pytest.mark.parametrize("kind", noninferiority.KINDS)
def test_pairs_have_the_planted_difference_and_spread(kind: str) -> None:
    found = differences(Cell("candidate", kind, 0.25, 1.0), 200)
    if kind == "rare":
        assert np.mean(found > 5) == pytest.approx(0.1, abs=0.06)
        found = np.where(found > 5, found - 10, found) + 1
    assert found.mean() == pytest.approx(1.0, abs=0.08)
    assert found.std() == pytest.approx(0.25, rel=0.3)


def test_falls_of_the_default_vary_as_they_shall() -> None:
    for deviation in noninferiority.FALL_DEVIATIONS:
        trainings = Trainings(Cell("study", "normal", 0.1, 1.0, deviation), 0)
        falls = [fall_of(trainings.losses(None, seed)).mean for seed in range(200)]
        assert np.std(falls) / np.mean(falls) == pytest.approx(deviation, rel=0.2)
