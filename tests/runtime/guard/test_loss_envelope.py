"""The guard's tests of losses: how often they err, what they see, what they remember."""

from __future__ import annotations

import json
import math
import pickle
import random

import pytest

from hvd_autosync.runtime.guard.loss_envelope import _NUMBERS, LossEnvelope
from hvd_autosync.search_space.trial import LOSS_WINDOW, LossPrediction
from hvd_autosync.study.loss_prediction import predict_losses

STEPS, NOISE = 192, 0.2


def losses(dice: random.Random, excess: float = 0.0, seeds: float = 0.0) -> list[float]:
    """Of a training whose loss falls by some 2.5, ``excess`` above others after 100 steps."""
    own = dice.gauss(0, seeds)
    return [
        2.5 + 2.5 * math.exp(-step / 20) + excess * min(step / 100, 1) + own + dice.gauss(0, NOISE)
        for step in range(STEPS)
    ]


def means(steps: list[float]) -> list[float]:
    return [sum(steps[i : i + LOSS_WINDOW]) / LOSS_WINDOW for i in range(0, STEPS, LOSS_WINDOW)]


def ended(count: int, excess: float, *, seeds: float = 0.0, own: bool = False) -> float:
    """The share of simulated trainings that are ended within the prediction."""
    dice, ends = random.Random(1), 0
    for _ in range(count):
        default = [losses(dice, seeds=seeds) for _ in range(4)]
        judged = [losses(dice, excess, seeds) for _ in range(4 * own)]
        envelope = LossEnvelope(predict_losses(default, judged))
        training = means(losses(dice, excess, seeds))
        ends += any(envelope.accepts(mean, window) for window, mean in enumerate(training))
    return ends / count


def test_one_training_in_a_hundred_that_is_as_good_is_ended() -> None:
    assert ended(300, 0.0) < 0.025
    assert ended(300, 0.0, seeds=NOISE / math.sqrt(LOSS_WINDOW)) < 0.05


def test_a_loss_that_falls_behind_is_seen() -> None:
    assert ended(60, 0.15) > 0.95


def test_a_strategy_that_was_admitted_is_compared_with_its_own_trials() -> None:
    assert ended(60, 0.15, own=True) < 0.02


def test_what_is_gross_is_seen_at_once_and_what_is_small_at_the_end() -> None:
    prediction = LossPrediction((2.0,) * 6, (0.04,) * 6)

    def windows(mean: float) -> int:
        envelope = LossEnvelope(prediction)
        return next((w for w in range(6) if envelope.accepts(mean, w)), 6)

    assert [windows(2.0 + excess) for excess in (0.3, 0.1, 0.06, 0.03)] == [0, 2, 3, 6]
    envelope = LossEnvelope(prediction)
    envelope.forget_prediction()
    assert not envelope.accepts(9.0, 0)


@pytest.mark.parametrize("mean", [math.nan, math.inf])
def test_what_is_not_finite_is_never_accepted(mean: float) -> None:
    assert "not finite" in LossEnvelope().accepts(mean, 0)
    envelope = LossEnvelope()
    assert not envelope.accepts(2.0, 0) and "not finite" in envelope.accepts_average(mean, 2, 64)


def test_a_loss_that_has_fallen_may_not_rise_again() -> None:
    """Not even to where it began, which was long ago."""
    envelope, dice = LossEnvelope(), random.Random(1)
    for window in range(200):
        mean = 2.0 + 3.0 * math.exp(-window / 20) + dice.gauss(0, 0.04)
        assert not envelope.accepts(mean, window)
    assert not envelope.accepts(2.3, 200)
    assert "risen to 3 from" in envelope.accepts(3.0, 201)
    assert not envelope.accepts(2.0, 202)


def test_the_tests_of_another_rank_are_taken_over_whole() -> None:
    """Ranks that differed in one number would decide differently, and wait for each other."""
    prediction = LossPrediction((2.0,) * 6, (0.04,) * 6)
    one, other, dice = LossEnvelope(prediction), LossEnvelope(prediction), random.Random(1)
    for window in range(9):
        assert not one.accepts(2.0 - 0.01 * window + dice.gauss(0, 0.01), window)
        assert not one.accepts_average(2.0, 4, 64)
    other.take(json.loads(json.dumps(LossEnvelope().to_json())))
    assert vars(other) == vars(LossEnvelope(prediction)), "also what is infinite"
    other.take(json.loads(json.dumps(one.to_json())))
    assert vars(other) == vars(one) != vars(LossEnvelope(prediction))
    assert not any(getattr(one, name) in (0, math.inf) for name in _NUMBERS)


def test_ups_and_downs_of_a_small_loss_are_healthy() -> None:
    envelope, dice = LossEnvelope(), random.Random(1)
    for window in range(2000):
        mean = 2.3 * math.exp(-window / 10) + (0.2 if dice.random() < 0.01 else 0.002)
        assert not envelope.accepts(mean, window)


def test_a_loss_below_zero_is_judged_alike() -> None:
    envelope = LossEnvelope()
    assert not any(envelope.accepts(-5.0 - 0.1 * window, window) for window in range(10))
    assert not envelope.accepts(-5.2, 10) and envelope.accepts(-2.0, 11)


def jumping(jump: float, windows: int) -> int:
    """In which window averages that are above their replicas by ``jump`` are seen."""
    envelope, dice = LossEnvelope(), random.Random(1)
    for window in range(windows):
        assert not envelope.accepts(2.0 + dice.gauss(0, 0.04), window)
        # Four of 64 losses, each of a deviation of 0.3.
        if envelope.accepts_average(2.0 + jump + dice.gauss(0, 0.15), 4, 64):
            return window
    return windows


def test_the_steep_fall_of_the_first_windows_is_no_noise() -> None:
    """Windows of a language model, and what it had lost after an average of tiny top-k."""
    envelope = LossEnvelope()
    for window, mean in enumerate((4.41, 3.10, 2.89, 2.80, 2.90, 2.71, 2.78, 2.71)):
        assert not envelope.accepts(mean, window)
    assert "risen" in envelope.accepts(3.96, 8)


def test_an_average_is_compared_with_its_replicas_over_all_rounds() -> None:
    assert jumping(3.0, 50) == 3  # what is noise is known then
    assert 4 < jumping(0.3, 50) < 40, "no single one of them is out of the ordinary"
    assert jumping(0.0, 2000) == 2000 and jumping(-0.3, 2000) == 2000


def test_an_envelope_does_not_grow_with_the_training() -> None:
    envelope = LossEnvelope()
    sizes = []
    for _ in range(2):
        for window in range(5000):
            assert not envelope.accepts(2.0 + 0.01 * (window % 2), window)
            assert not envelope.accepts_average(2.0, 2, 64)
        sizes.append(len(pickle.dumps(envelope)))
    assert sizes[1] - sizes[0] < 16, f"{sizes} bytes after 5,000 and 10,000 windows"
