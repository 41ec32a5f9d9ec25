from __future__ import annotations

from hvd_autosync.learner import Observation, RandomLearner
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace


def test_every_strategy_once_and_then_none(tiny_space: SearchSpace) -> None:
    learner, seen = RandomLearner(), list[Observation]()
    while suggestion := learner.suggest(Problem(tiny_space), seen, seed=0):
        assert len(seen) < 9
        seen.append(Observation(suggestion.strategy, 1.0))
    assert len({one.strategy for one in seen}) == 9


def test_it_is_pure_and_differs_from_call_to_call(mixed_space: SearchSpace) -> None:
    learner = RandomLearner()
    first = learner.suggest(Problem(mixed_space), [], seed=1)
    assert first is not None
    assert learner.suggest(Problem(mixed_space), [], seed=1) == first
    later = learner.suggest(Problem(mixed_space), [Observation(first.strategy, None)], seed=1)
    pending = learner.suggest(Problem(mixed_space), [], [first.strategy], seed=1)
    other = learner.suggest(Problem(mixed_space), [], seed=2)
    assert later is not None and pending is not None and other is not None
    assert first.strategy not in {later.strategy, pending.strategy, other.strategy}
