"""The losses that ``benchmarks/noninferiority.py`` and ``benchmarks/guard_alarms.py`` simulate."""

from __future__ import annotations

import statistics
import sys
from itertools import pairwise, product
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import guard_alarms

from hvd_autosync.study.loss_prediction import predict_losses


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
