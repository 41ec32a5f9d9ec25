from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from hvd_autosync.learner import Observation, chance_of_gain, fit
from hvd_autosync.learner.points import every_point, sobol_points
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace

Tell = Callable[..., Observation]


def flat(space: SearchSpace, count: int) -> list[Observation]:
    """Strategies that all take 0.1 s, measured with 0.5 % noise."""
    noise = np.random.default_rng(0).normal(0, 0.005, count)
    points = sobol_points(space, count, seed=1)
    return [
        Observation(space.decode(point), 0.1 * math.exp(error), 0.0005)
        for point, error in zip(points, noise, strict=True)
    ]


def test_it_is_low_where_nothing_matters_and_much_was_tried(mixed_space: SearchSpace) -> None:
    assert chance_of_gain(Problem(mixed_space), flat(mixed_space, 50), seed=0) < 0.1


def test_it_is_high_where_little_was_tried(mixed_space: SearchSpace, tell: Tell) -> None:
    assert chance_of_gain(Problem(mixed_space), [tell(mixed_space.default)], seed=0) > 0.8
    seen = [tell(mixed_space.decode(p)) for p in sobol_points(mixed_space, 5, seed=0)]
    assert chance_of_gain(Problem(mixed_space), seen, seed=0) > 0.8


def test_it_is_one_before_anything_was_measured(mixed_space: SearchSpace) -> None:
    assert chance_of_gain(Problem(mixed_space), [], seed=0) == 1.0
    failed = [Observation(mixed_space.default, None)]
    assert chance_of_gain(Problem(mixed_space), failed, seed=0) == 1.0


def test_more_gain_is_less_likely(mixed_space: SearchSpace, tell: Tell) -> None:
    seen = [tell(mixed_space.decode(p)) for p in sobol_points(mixed_space, 12, seed=0)]
    surrogate = fit(Problem(mixed_space), seen)
    chances = [
        chance_of_gain(Problem(mixed_space), seen, gain=gain, seed=0, surrogate=surrogate)
        for gain in (0.0, 0.1, 0.3, 0.9)
    ]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > chances[-1]
    assert chances[1] == chance_of_gain(Problem(mixed_space), seen, gain=0.1, seed=0)


def test_a_small_space_that_was_tried_completely_holds_nothing_more(
    tiny_space: SearchSpace,
) -> None:
    points = every_point(tiny_space)
    assert points is not None
    seen = [
        Observation(tiny_space.decode(point), 0.1 * 1.3**rank, 1e-4)
        for rank, point in enumerate(points)
    ]
    assert chance_of_gain(Problem(tiny_space), seen * 3, seed=0) < 0.05


@pytest.mark.parametrize("seed", [0, 1])
def test_it_follows_from_the_seed(mixed_space: SearchSpace, tell: Tell, seed: int) -> None:
    seen = [tell(mixed_space.decode(p)) for p in sobol_points(mixed_space, 8, seed=0)]
    first = chance_of_gain(Problem(mixed_space), seen, gain=0.2, seed=seed)
    assert first == chance_of_gain(Problem(mixed_space), seen, gain=0.2, seed=seed)
