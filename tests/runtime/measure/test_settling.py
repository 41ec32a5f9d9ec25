"""How many steps a strategy takes to settle, from their durations."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_autosync.runtime.measure.settling import settled_after
from hvd_autosync.search_space.trial import MIN_MEASURED_STEPS

WARMUP = 3


@pytest.mark.parametrize("slow", [0, 1, 4, 6])
def test_long_steps_after_the_warmup_are_left_out(slow: int) -> None:
    steps = [9.0] * WARMUP + [2.0] * slow + [1.0, 1.01, 0.99] * 5
    assert settled_after(steps, WARMUP) == WARMUP + slow


def test_at_most_half_of_the_steps_are_left_out() -> None:
    assert settled_after([1.0] * WARMUP + [2.0] * 6 + [1.0] * 4, WARMUP) == WARMUP + 5


def test_long_steps_later_on_are_measured() -> None:
    steps = [1.0] * WARMUP + [1.0, 2.0, 2.0, 1.0, 2.0, *[1.0] * 9]
    assert settled_after(steps, WARMUP) == WARMUP


@pytest.mark.parametrize("steps", [[], [1.0] * 2, [5.0] * WARMUP, [1.0] * WARMUP + [9.0] * 5])
def test_of_few_steps_nothing_is_said(steps: list[float]) -> None:
    assert settled_after(steps, WARMUP) == WARMUP


def test_enough_steps_for_a_step_time_are_left() -> None:
    steps = [1.0] * WARMUP + [9.0] * 3 + [1.0] * 4
    assert settled_after(steps, WARMUP) == len(steps) - MIN_MEASURED_STEPS


@pytest.mark.parametrize("spread", [0.02, 0.2])
def test_noise_is_not_taken_for_settling(spread: float) -> None:
    """Of 500 trials of twenty steps few lose any, and the mean is not lower for that."""
    noise = np.random.default_rng(1).lognormal(0.0, spread, (500, WARMUP + 20))
    found = [settled_after(steps.tolist(), WARMUP) for steps in noise]
    assert sum(each > WARMUP for each in found) <= 15
    kept = [steps[count:].mean() for steps, count in zip(noise, found, strict=True)]
    assert np.mean(kept) == pytest.approx(noise[:, WARMUP:].mean(), rel=0.002)
