from __future__ import annotations

import numpy as np

from hvd_autosync.learner import Observation
from hvd_autosync.learner.feasibility import feasibility
from hvd_autosync.learner.points import encode_all, sobol_points
from hvd_autosync.search_space import SearchSpace


def test_failing_strategies_are_separated_from_others(mixed_space: SearchSpace) -> None:
    """A choice that always fails is learned from ten failures among thirty trials."""

    def fails(strategy: object) -> bool:
        return strategy["codec"] == "int8"  # type: ignore[index]

    tried = [mixed_space.decode(point) for point in sobol_points(mixed_space, 30, 0)]
    seen = [Observation(s, None if fails(s) else 0.1) for s in tried]
    unseen = sobol_points(mixed_space, 60, 1)
    feasibility_probabilities = feasibility(mixed_space, seen)(unseen)
    failing = np.array([fails(mixed_space.decode(point)) for point in unseen])
    assert feasibility_probabilities[~failing].min() > 0.6
    assert np.mean(feasibility_probabilities[failing] < 0.5) > 0.8
    assert feasibility_probabilities[failing].max() < np.median(feasibility_probabilities[~failing])


def test_without_failures_all_can_run(mixed_space: SearchSpace) -> None:
    points = sobol_points(mixed_space, 5, 0)
    assert feasibility(mixed_space, [])(points).tolist() == [1.0] * 5
    seen = [Observation(mixed_space.default, 0.1)]
    assert feasibility(mixed_space, seen)(points).tolist() == [1.0] * 5


def test_all_failures_leave_a_chance_far_from_them(mixed_space: SearchSpace) -> None:
    default = mixed_space.default
    chance = feasibility(mixed_space, [Observation(default, None)] * 3)
    far = default.replacing(cycle=90.0, streams=4, hierarchical=True, codec="int8", fusion=0)
    near = default.replacing(cycle=1.2)
    here, there, elsewhere = chance(encode_all(mixed_space, [default, near, far]))
    assert here < 0.1 and there < 0.3 < elsewhere
