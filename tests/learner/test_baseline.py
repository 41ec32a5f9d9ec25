from __future__ import annotations

from hvd_autosync.learner import Observation, RandomLearner
from hvd_autosync.search_space import SearchSpace, Strategy


def test_every_strategy_once_and_then_none(tiny_space: SearchSpace) -> None:
    learner, tried = RandomLearner(), list[Strategy]()
    while suggestion := learner.suggest(tiny_space, [Observation(s, 1.0) for s in tried], seed=0):
        assert len(tried) < 9
        tried.append(suggestion.strategy)
    assert len(set(tried)) == 9


def test_it_is_pure_and_differs_from_call_to_call(mixed_space: SearchSpace) -> None:
    learner = RandomLearner()
    first = learner.suggest(mixed_space, [], seed=1)
    assert first is not None
    assert learner.suggest(mixed_space, [], seed=1) == first
    later = learner.suggest(mixed_space, [Observation(first.strategy, None)], seed=1)
    pending = learner.suggest(mixed_space, [], [first.strategy], seed=1)
    other = learner.suggest(mixed_space, [], seed=2)
    assert later is not None and pending is not None and other is not None
    assert first.strategy not in {later.strategy, pending.strategy, other.strategy}
