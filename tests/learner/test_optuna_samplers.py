"""Optuna's samplers as learners."""

import pytest

from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.optuna_samplers import OptunaLearner
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
@pytest.mark.parametrize("seed", [0, 2**40])
def test_nothing_is_proposed_that_was_tried_or_is_pending(
    tiny_space: SearchSpace, sampler: str, seed: int
) -> None:
    problem, learner = Problem(tiny_space), OptunaLearner(sampler)
    observations: list[Observation] = []
    pending = [tiny_space.default]
    while (found := learner.suggest(problem, observations, pending, seed=seed)) is not None:
        strategy = tiny_space.complete(found.strategy)
        assert strategy not in [tiny_space.complete(p) for p in pending]
        assert strategy not in [tiny_space.complete(o.strategy) for o in observations]
        observations.append(Observation(found.strategy, 0.1 + 0.01 * len(observations), 0.001))
    assert len(observations) == 8  # of nine, one is pending
