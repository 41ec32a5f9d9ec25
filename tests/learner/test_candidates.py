from __future__ import annotations

from collections.abc import Callable

from hvd_autosync.learner import Observation, best_tried, fit, worth_confirming
from hvd_autosync.learner.points import sobol_points
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace, Strategy

Tell = Callable[..., Observation]


def test_the_lucky_one_does_not_lead(tiny_space: SearchSpace) -> None:
    lucky, steady, slow = (
        tiny_space.complete({"c": "x"}),
        tiny_space.complete({"a": True, "c": "y"}),
        tiny_space.complete({"c": "z"}),
    )
    seen = [
        Observation(lucky, 0.095, 0.02),
        Observation(lucky, 0.130),
        Observation(lucky, 0.128),
        *[Observation(steady, step) for step in (0.100, 0.101, 0.099)],
        Observation(slow, 0.2),
    ]
    assert best_tried(Problem(tiny_space), seen, 3) == [steady, lucky, slow]


def test_distinct_measured_and_at_most_count(mixed_space: SearchSpace, tell: Tell) -> None:
    strategies = [mixed_space.decode(p) for p in sobol_points(mixed_space, 6, seed=0)]
    seen = [tell(s, seed) for seed in range(2) for s in strategies[:5]]
    seen.append(Observation(strategies[5], None))
    ranked = best_tried(Problem(mixed_space), seen, 10)
    assert len(ranked) == 5 and set(ranked) == set(strategies[:5])
    assert best_tried(Problem(mixed_space), seen, 2, fit(Problem(mixed_space), seen)) == ranked[:2]


def test_the_default_is_one_of_them(mixed_space: SearchSpace) -> None:
    slower = mixed_space.complete({"codec": "int8"})
    seen = [Observation(mixed_space.default, 0.1), Observation(slower, 0.3)]
    assert best_tried(Problem(mixed_space), seen, 2) == [mixed_space.default, slower]
    # The empty strategy is the default, too.
    as_it_is = [Observation(Strategy(), 0.1)]
    assert best_tried(Problem(mixed_space), as_it_is, 1) == [mixed_space.default]


def test_a_lucky_default_does_not_end_the_matter(tiny_space: SearchSpace) -> None:
    default = tiny_space.default
    close, slow = tiny_space.complete({"c": "y"}), tiny_space.complete({"c": "z"})
    seen = [
        Observation(default, 0.098, 0.005),
        *[Observation(close, step, 0.005) for step in (0.099, 0.100)],
        *[Observation(slow, step, 0.005) for step in (0.2, 0.21)],
    ]
    assert best_tried(Problem(tiny_space), seen, 1) == [default]
    assert worth_confirming(Problem(tiny_space), seen, default, 2) == [close]
    assert worth_confirming(Problem(tiny_space), [], default, 2) == []


def test_without_measurements_there_are_no_candidates(mixed_space: SearchSpace) -> None:
    assert best_tried(Problem(mixed_space), [Observation(mixed_space.default, None)], 3) == []
