from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from hvd_autosync.learner import BayesianLearner, Observation, expected_gain, fit
from hvd_autosync.learner.points import encode_all, sobol_points
from hvd_autosync.learner.problem import Problem
from hvd_autosync.learner.stopping import expected_saving
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
        sampled = float(-np.expm1(-np.maximum(pair[:, 0] - pair[:, 1], 0.0)).mean())
        inputs = surrogate.inputs(tried), surrogate.inputs(point[None])
        found = expected_gain(surrogate, *inputs)
        assert found == pytest.approx(sampled, rel=0.02, abs=1e-3)


@pytest.mark.parametrize("deviation", [1e-6, 0.01, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("scores", [-8.0, -2.0, -0.5, 0.0, 0.5, 3.0])
def test_it_is_the_integral_over_a_normal_gain(scores: float, deviation: float) -> None:
    """Also of a gain that many standard deviations exclude, where it is tiny."""
    gain = scores * deviation

    def share(z: float) -> float:
        return -math.expm1(-(gain + z * deviation)) * float(norm.pdf(z))

    expected, _ = quad(share, -scores, max(-scores, 0.0) + 12, epsabs=0, epsrel=1e-10, limit=200)
    assert expected_saving(gain, deviation) == pytest.approx(expected, rel=1e-6, abs=0)


def test_it_is_a_share_whatever_the_gain() -> None:
    assert expected_saving(0.5, 0.0) == pytest.approx(1 - math.exp(-0.5))
    assert expected_saving(-0.5, 0.0) == 0.0
    for gain in (-1e6, -30.0, 0.0, 30.0, 1e6):
        for deviation in (0.0, 1e-300, 1e-8, 1.0, 40.0, 1e3):
            assert 0.0 <= expected_saving(gain, deviation) <= 1.0
