from __future__ import annotations

import torch

from hvd_autosync.learner import Observation, SobolLearner
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace, Strategy


def propose(space: SearchSpace, count: int, seed: int = 0) -> list[Strategy]:
    tried: list[Strategy] = []
    for _ in range(count):
        seen = [Observation(s, 1.0) for s in tried]
        suggestion = SobolLearner().suggest(Problem(space), seen, seed=seed)
        if suggestion is None:
            break
        assert suggestion.kind == "sobol"
        tried.append(suggestion.strategy)
    return tried


def test_successive_points_cover_the_space_evenly(mixed_space: SearchSpace) -> None:
    tried = propose(mixed_space, 8)
    cycle = mixed_space["cycle"]
    eighths = {int(8 * cycle.to_unit(strategy["cycle"])) for strategy in tried}
    assert eighths == set(range(8))


def test_every_strategy_once_and_then_none(tiny_space: SearchSpace) -> None:
    tried = propose(tiny_space, 20)
    assert len(set(tried)) == len(tried) == 9


def test_pending_strategies_are_not_repeated(mixed_space: SearchSpace) -> None:
    learner = SobolLearner()
    first = learner.suggest(Problem(mixed_space), [], seed=0)
    assert first is not None
    second = learner.suggest(Problem(mixed_space), [], [first.strategy], seed=0)
    assert second is not None and second.strategy != first.strategy


def test_it_leaves_the_global_generator_alone(mixed_space: SearchSpace) -> None:
    state = torch.random.get_rng_state()
    assert propose(mixed_space, 3, seed=5) == propose(mixed_space, 3, seed=5)
    assert propose(mixed_space, 3, seed=5) != propose(mixed_space, 3, seed=6)
    assert torch.equal(torch.random.get_rng_state(), state)
