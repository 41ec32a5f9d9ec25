from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from hvd_autosync.learner import Observation
from hvd_autosync.learner.outcome_transform import StepTimes
from hvd_autosync.search_space import Strategy


def of_different_strategies(steps: Iterable[float]) -> list[Observation]:
    return [Observation(Strategy({"buckets": i}), step, 0.0) for i, step in enumerate(steps)]


def without_priors(seen: Sequence[Observation]) -> StepTimes:
    return StepTimes.of(seen, np.empty((len(seen), 0)), np.empty(0), np.empty(0), 0.25)


def transform(*steps: float) -> StepTimes:
    return without_priors(of_different_strategies(steps))


def explained(design_matrix: list[float], weight: float) -> StepTimes:
    """The transform of three step times, with a prior function that predicts them."""
    seen = of_different_strategies((0.1, 0.2, 0.4))
    basis = np.array(design_matrix)[:, np.newaxis]
    return StepTimes.of(seen, basis, np.array([weight]), np.array([0.4]), 0.1)


def test_what_prior_functions_explain_is_no_spread() -> None:
    right = explained(np.log([1.0, 2.0, 4.0]).tolist(), 1.0)
    assert right.center == pytest.approx(math.log(0.1))
    assert right.scale < 0.1 < transform(0.1, 0.2, 0.4).scale


def test_an_adversarial_source_does_not_widen_the_unit() -> None:
    """The residual scale with an anti-correlated source is no larger than without it."""
    adversarial = explained((-np.log([1.0, 2.0, 4.0])).tolist(), 0.9)
    assert adversarial.scale < transform(0.1, 0.2, 0.4).scale


def test_what_weights_leave_open_is_in_the_unit() -> None:
    """The unit stays the same even if there are as many weights as trials."""
    rng = np.random.default_rng(0)
    scales = []
    for _ in range(200):
        basis = rng.normal(0, 0.4, (6, 7))
        log_step = basis @ rng.normal(0, 0.5, 7) + rng.normal(0, 0.12, 6)
        seen = of_different_strategies(np.exp(log_step))
        scales.append(StepTimes.of(seen, basis, np.zeros(7), np.full(7, 0.5), 0.12).scale)
    assert np.sqrt(np.mean(np.square(scales))) == pytest.approx(0.12, rel=0.1)


def test_the_unit_follows_the_spread() -> None:
    narrow = transform(*np.exp(np.full(40, -1.0)))
    wide = transform(*np.exp(np.random.default_rng(0).normal(0, 2, 40)))
    assert narrow.scale < 0.06
    assert wide.scale == pytest.approx(2, rel=0.3)


def test_repeated_trials_of_one_strategy_do_not_show_that_others_differ_little() -> None:
    seen = of_different_strategies(np.exp(np.random.default_rng(0).normal(0, 1, 10)))
    repeated = without_priors([*seen, *[seen[3]] * 40])
    once = without_priors(seen)
    assert repeated.scale == pytest.approx(once.scale)
    assert repeated.center == pytest.approx(once.center)
    assert len(repeated.log_step) == 50


def test_a_strategy_counts_with_the_noise_of_the_mean_of_its_trials() -> None:
    one, other = Strategy({"buckets": 1}), Strategy({"buckets": 2})
    seen = [Observation(one, 0.2, 0.0), *[Observation(other, 0.1, 0.02)] * 3]
    basis = np.array([[0.0], [1.0], [1.0], [1.0]])
    repeated = StepTimes.of(seen, basis, np.zeros(1), np.ones(1), 0.1)
    average = [seen[0], Observation(other, 0.1, 0.02 / math.sqrt(3))]
    once = StepTimes.of(average, basis[:2], np.zeros(1), np.ones(1), 0.1)
    assert repeated.scale == pytest.approx(once.scale)


def test_a_unit_of_time_only_moves_the_center() -> None:
    seconds, milliseconds = transform(0.1, 0.3), transform(100.0, 300.0)
    assert milliseconds.scale == pytest.approx(seconds.scale)
    assert milliseconds.center - seconds.center == pytest.approx(math.log(1000))
