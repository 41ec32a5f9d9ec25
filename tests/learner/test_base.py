from __future__ import annotations

import pytest

from hvd_autosync.learner import BayesianLearner, Learner, Observation, RandomLearner, SobolLearner
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace


@pytest.mark.parametrize("learner", [BayesianLearner(2), SobolLearner(), RandomLearner()])
def test_the_contract(mixed_space: SearchSpace, learner: Learner) -> None:
    """What every learner keeps: complete strategies, never the same one, pure answers."""
    seen = [Observation(mixed_space.default, 0.2)]
    for step in range(5):
        first = learner.suggest(Problem(mixed_space), seen, seed=0)
        assert first is not None
        assert first == learner.suggest(Problem(mixed_space), seen, seed=0)
        assert first.strategy == mixed_space.complete(first.strategy)
        assert first.strategy not in [o.strategy for o in seen]
        seen.append(Observation(first.strategy, None if step == 1 else 0.1 + 0.01 * step))
    assert learner.name
