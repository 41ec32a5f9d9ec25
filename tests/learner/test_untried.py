from __future__ import annotations

import numpy as np

from hvd_autosync.learner import Observation
from hvd_autosync.learner.points import discretize, every_point
from hvd_autosync.learner.problem import Problem
from hvd_autosync.learner.untried import excluded_keys, first_untried, space_exhausted
from hvd_autosync.search_space import SearchSpace
from hvd_autosync.search_space.knobs import categorical_knob, float_knob


def test_tried_failed_and_pending_are_taken(tiny_space: SearchSpace) -> None:
    points = every_point(tiny_space)
    assert points is not None
    one, two, three = (tiny_space.decode(point) for point in points[:3])
    taken = excluded_keys(tiny_space, [Observation(one, 0.1), Observation(two, None)], [three])
    assert first_untried(Problem(tiny_space), taken, lambda _: points[:4]) == tiny_space.decode(
        points[3]
    )


def test_the_last_untried_strategy_is_found_even_if_never_drawn(tiny_space: SearchSpace) -> None:
    points = every_point(tiny_space)
    assert points is not None
    last = tiny_space.decode(points[-1])
    taken = excluded_keys(tiny_space, (), [tiny_space.decode(point) for point in points[:-1]])
    assert not space_exhausted(tiny_space, taken)
    assert first_untried(Problem(tiny_space), taken, lambda _: points[:1]) == last


def test_what_can_never_be_used_comes_last(tiny_space: SearchSpace) -> None:
    points = every_point(tiny_space)
    assert points is not None
    allowed = tiny_space.decode(points[5])
    problem = Problem(
        tiny_space, feasible=lambda p: np.array([tiny_space.decode(row) == allowed for row in p])
    )
    assert first_untried(problem, set(), lambda count: points[:count]) == allowed
    assert first_untried(problem, set(), lambda _: points[:4]) == allowed  # never drawn
    rest = excluded_keys(tiny_space, (), [allowed])
    assert first_untried(problem, rest, lambda _: points[:4]) == tiny_space.decode(points[0])


def test_a_space_without_free_knobs_is_exhausted() -> None:
    only = categorical_knob("c", ("x",), "x", help="")
    fixed = float_knob("f", 1.0, 1.0, 1.0, help="")
    assert space_exhausted(SearchSpace(()), set())
    assert space_exhausted(SearchSpace((only, fixed)), set())


def test_a_narrow_continuous_space_runs_out() -> None:
    space = SearchSpace((float_knob("f", 1.0, 1.001, 1.0, help=""),))
    taken = excluded_keys(space, (), [space.decode([0.0]), space.decode([1.0])])
    assert (
        first_untried(
            Problem(space), taken, lambda n: discretize(space, np.linspace(0, 1, n)[:, None])
        )
        is None
    )
