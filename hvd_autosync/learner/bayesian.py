"""The learner that hvd_autosync uses: a few Sobol points, then a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_autosync.learner.acquisition import propose
from hvd_autosync.learner.base import Suggestion
from hvd_autosync.learner.gp import Surrogate, fit
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import encode_all
from hvd_autosync.learner.sobol import SobolLearner
from hvd_autosync.learner.untried import exhausted, taken_keys
from hvd_autosync.search_space import SearchSpace, Strategy

#: Half the width of a 90 % interval of a normal distribution, in standard deviations.
_Z90 = 1.645


class BayesianLearner:
    """Bayesian optimization of the log step time.

    Args:
        initial_points: Distinct strategies other than the default that are tried (or pending)
            before the model takes over. As long as no trial was measured it does not.
    """

    name = "bayesian"

    def __init__(self, initial_points: int = 4) -> None:
        self.initial_points = initial_points

    def suggest(
        self,
        space: SearchSpace,
        observations: Sequence[Observation],
        pending: Sequence[Strategy] = (),
        *,
        seed: int,
    ) -> Suggestion | None:
        """See :class:`hvd_autosync.learner.base.Learner`."""
        taken = taken_keys(space, observations, pending)
        if exhausted(space, taken):
            return None
        explored = len(taken - taken_keys(space, (), [space.default]))
        if explored >= self.initial_points and any(seen.measured for seen in observations):
            suggestion = _from_model(space, observations, pending, seed)
            if suggestion is not None:
                return suggestion
        return SobolLearner().suggest(space, observations, pending, seed=seed)


def _from_model(
    space: SearchSpace,
    observations: Sequence[Observation],
    pending: Sequence[Strategy],
    seed: int,
) -> Suggestion | None:
    """The model's suggestion; ``None`` when all its candidates are taken."""
    surrogate = fit(space, observations)
    tried = encode_all(space, [seen.strategy for seen in observations])
    call = np.random.SeedSequence([seed, len(observations), len(pending)])
    found = propose(
        surrogate, tried, encode_all(space, pending), int(call.generate_state(1)[0] >> 1)
    )
    if found is None:
        return None
    point, acquisition = found
    strategy = space.decode(point)
    return Suggestion(strategy, "model", _explain(surrogate, strategy, acquisition))


def _explain(surrogate: Surrogate, strategy: Strategy, acquisition: float) -> dict[str, Any]:
    """The suggestion's ``info``: the predicted step time with its 90 % interval, seconds."""
    mean, deviation = (float(array[0]) for array in surrogate.predict([strategy]))
    return {
        "predicted_step_s": math.exp(mean),
        "predicted_low_s": math.exp(mean - _Z90 * deviation),
        "predicted_high_s": math.exp(mean + _Z90 * deviation),
        "acquisition": acquisition,
    }
