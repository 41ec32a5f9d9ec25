"""Shares of knobs in the spread of a known function."""

from __future__ import annotations

from collections.abc import Callable
from math import exp

import pytest

from hvd_autosync.learner import Observation, Problem, knob_importance
from hvd_autosync.learner.points import sobol_points
from hvd_autosync.search_space import SearchSpace, Strategy, catalogue_knob

SPACE = SearchSpace(
    tuple(map(catalogue_knob, ("cycle_time_ms", "buckets", "bucket_rule", "order")))
)


def seen(step_s: Callable[[Strategy], float]) -> list[Observation]:
    strategies = [SPACE.decode(point) for point in sobol_points(SPACE, 60, 3)]
    return [Observation(s, step_s(s), 1e-4) for s in strategies]


def test_shares_are_those_of_the_function() -> None:
    """Variances of 4 u + 2 [late] with u uniform: 16 / 12 and 4 / 4."""
    cycle = SPACE["cycle_time_ms"]

    def step_s(strategy: Strategy) -> float:
        late = strategy["order"] == "priority"
        return exp(0.4 * cycle.to_unit(strategy["cycle_time_ms"]) + 0.2 * late)

    shares = knob_importance(Problem(SPACE), seen(step_s))
    whole = 0.16 / 12 + 0.04 / 4
    assert list(shares)[:2] == ["cycle_time_ms", "order"]
    assert shares["cycle_time_ms"] == pytest.approx(0.16 / 12 / whole, abs=0.1)
    assert shares["order"] == pytest.approx(0.04 / 4 / whole, abs=0.1)
    assert shares["buckets"] < 0.05


def test_where_nothing_makes_a_difference_nothing_matters() -> None:
    shares = knob_importance(Problem(SPACE), seen(lambda strategy: 0.1))
    assert all(share < 0.6 for share in shares.values())
