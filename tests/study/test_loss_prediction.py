"""What quality trials say of the losses of a training."""

from __future__ import annotations

import math
import random

import pytest

from hvd_autosync.study.loss_prediction import predict_losses


def trial(dice: random.Random, noise: float = 0.2, shift: float = 0.0) -> list[float]:
    return [4.0 - step / 100 + shift + dice.gauss(0, noise) for step in range(200)]


def test_levels_are_those_of_the_default_with_half_of_the_tolerance() -> None:
    dice = random.Random(1)
    found = predict_losses([trial(dice, 0.01) for _ in range(4)], tolerance=0.1)
    assert len(found.levels) == len(found.deviations) == 6
    # It falls by 1.7 from the first twentieth to the last quarter.
    assert found.levels == pytest.approx(
        [4.0 - (32 * window + 15.5) / 100 + 0.5 * 0.17 for window in range(6)], abs=0.01
    )


def test_a_strategy_that_was_admitted_may_be_as_it_was_and_the_tolerance_above() -> None:
    dice = random.Random(1)
    default, own = ([trial(dice, 0.01, shift) for _ in range(4)] for shift in (0.0, 0.3))
    judged = predict_losses(default, own, tolerance=0.1)
    assert judged.levels == pytest.approx(
        [4.3 - (32 * window + 15.5) / 100 + 0.17 for window in range(6)], abs=0.01
    )
    better = predict_losses(own, default, tolerance=0.1)
    assert better.levels == pytest.approx(judged.levels, abs=0.01)


def test_deviations_are_those_of_a_new_training_about_the_mean_of_the_trials() -> None:
    dice, found = random.Random(1), []
    for _ in range(50):
        found += predict_losses([trial(dice) for _ in range(4)]).deviations
    expected = 0.2 / math.sqrt(32) * math.sqrt(1 + 1 / 4)
    assert expected < sum(found) / len(found) < 1.3 * expected, "on the safe side"
    apart = predict_losses([trial(dice, shift=0.3 * seed) for seed in range(4)])
    assert min(apart.deviations) > 0.3, "seeds make that of all windows alike"


def test_a_trial_that_was_cut_short_does_not_end_the_prediction() -> None:
    dice = random.Random(1)
    default, own = ([trial(dice, shift=shift) for _ in range(4)] for shift in (0.0, 0.3))
    whole = predict_losses(default, own)
    assert len(whole.levels) == 6
    assert predict_losses([*default, default[0][:25]], [own[0][:25], *own]) == whole
    longer = [losses[:150] for losses in default[:1]]
    assert len(predict_losses([*default, *longer]).levels) == 150 // 32, "it is long enough"


@pytest.mark.parametrize(
    "trials",
    [
        [],
        [[1.0, 2.0] * 32],
        [[1.0, 2.0] * 32, [1.0] * 31],
        [[1.0, 2.0] * 32, [math.nan] * 64],
        [[1.0] * 64] * 2,
    ],
)
def test_too_little_predicts_nothing(trials: list[list[float]]) -> None:
    assert predict_losses(trials).levels == ()
