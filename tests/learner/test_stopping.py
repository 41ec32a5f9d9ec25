from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from hvd_autosync.learner import BayesianLearner, Observation, expected_gain, fit
from hvd_autosync.learner.points import encode_all, sobol_points
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace

Tell = Callable[..., Observation]


def gain_of_next(space: SearchSpace, seen: list[Observation]) -> float:
    suggestion = BayesianLearner().suggest(Problem(space), seen, seed=0)
    assert suggestion is not None and suggestion.kind == "model"
    return float(suggestion.info["expected_gain"])


def flat(space: SearchSpace, count: int) -> list[Observation]:
    """Strategies that all take 0.1 s, measured with 0.5 % noise."""
    noise = np.random.default_rng(0).normal(0, 0.005, count)
    points = sobol_points(space, count, seed=1)
    return [
        Observation(space.decode(point), 0.1 * math.exp(error), 0.0005)
        for point, error in zip(points, noise, strict=True)
    ]


def test_it_is_low_where_nothing_matters_and_much_was_tried(mixed_space: SearchSpace) -> None:
    assert gain_of_next(mixed_space, flat(mixed_space, 50)) < 0.01


def test_it_is_high_where_little_was_tried(mixed_space: SearchSpace, tell: Tell) -> None:
    seen = [tell(mixed_space.decode(p)) for p in sobol_points(mixed_space, 6, seed=0)]
    assert gain_of_next(mixed_space, seen) > 0.03


def test_it_is_the_expectation_over_the_posterior(mixed_space: SearchSpace, tell: Tell) -> None:
    seen = [tell(mixed_space.decode(p)) for p in sobol_points(mixed_space, 12, seed=0)]
    surrogate = fit(Problem(mixed_space), seen)
    tried = encode_all(mixed_space, [one.strategy for one in seen])
    best = tried[np.argmin(surrogate.mean_at(tried))]
    for point in sobol_points(mixed_space, 5, seed=3):
        mean, covariance = surrogate.joint_at(np.stack([best, point]))
        rng = np.random.default_rng(0)
        pair = rng.multivariate_normal(mean, covariance, 200_000, check_valid="ignore")
        sampled = float(np.maximum(pair[:, 0] - pair[:, 1], 0.0).mean())
        inputs = surrogate.inputs(tried), surrogate.inputs(point[None])
        found = expected_gain(surrogate, *inputs)
        assert found == pytest.approx(-math.expm1(-sampled), rel=0.05, abs=1e-3)
