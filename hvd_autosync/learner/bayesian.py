"""The learner that hvd_autosync uses: a model, after a few Sobol points where nothing is known.

What it maximizes is the expected improvement times the chance that the trial can be measured at
all, per second of the trial [Snoek2012]_, and times the chance that the strategy may be used.

.. [Snoek2012] J. Snoek et al., "Practical Bayesian Optimization of Machine Learning Algorithms",
   NeurIPS 2012, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from hvd_autosync.learner.acquisition import propose
from hvd_autosync.learner.base import Suggestion
from hvd_autosync.learner.feasibility import feasibility
from hvd_autosync.learner.gp import fit
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import FloatArray, encode_all
from hvd_autosync.learner.problem import Problem
from hvd_autosync.learner.sobol import SobolLearner
from hvd_autosync.learner.stopping import expected_gain
from hvd_autosync.learner.surrogate import HALF_WIDTH_90, Surrogate
from hvd_autosync.learner.untried import excluded_keys, space_exhausted
from hvd_autosync.search_space import SearchSpace, Strategy

#: Seconds of a trial beside its steps: between the 0.2 of a warm one and the 5 of a cold one
#: (benchmarks/trial_overhead.py).
_OVERHEAD_S = 1.0
#: So many trials related tasks may ask for in vain; and a gain that is clear, as a logarithm.
_ADVICE, _CLEARLY = 2, 0.25
#: A strategy that may be used with less than this chance is nobody's rival; and the least chance.
_RIVAL, _LEAST = 0.5, 0.01


class BayesianLearner:
    """Bayesian optimization of the log step time.

    Args:
        initial_points: Distinct strategies other than the default that are tried (or pending)
            before the model takes over, where nothing is known beforehand; two more where related
            tasks have asked for two in vain. As long as no trial was measured it does not.
    """

    name = "bayesian"

    def __init__(self, initial_points: int = 4) -> None:
        self.initial_points = initial_points

    def suggest(
        self,
        problem: Problem,
        observations: Sequence[Observation],
        pending: Sequence[Strategy] = (),
        *,
        seed: int,
    ) -> Suggestion | None:
        """See :class:`hvd_autosync.learner.base.Learner`."""
        space = problem.space
        taken = excluded_keys(space, observations, pending)
        if space_exhausted(space, taken):
            return None
        surrogate = fit(problem, observations)
        default = excluded_keys(space, (), [space.default])
        advised = len(excluded_keys(space, observations, ()) - default)
        wanted = self._initial_points(space, surrogate, observations, advised)
        if len(taken - default) >= wanted and any(seen.measured for seen in observations):
            suggestion = _from_model(problem, surrogate, observations, pending, seed)
            if suggestion is not None:
                return suggestion
        suggestion = SobolLearner().suggest(problem, observations, pending, seed=seed)
        if suggestion is not None and surrogate.dropped:
            suggestion = replace(suggestion, info={"dropped": _dropped(surrogate)})
        return suggestion

    def _initial_points(
        self,
        space: SearchSpace,
        surrogate: Surrogate,
        observations: Sequence[Observation],
        ended: int,
    ) -> int:
        """How many strategies must have been tried or be pending before the model is asked.

        Physics is heard at once. So are related tasks, until two trials of theirs have come to
        nothing: one who is wrong of what is far away is not refuted by what he recommends. What
        was tried on their advice is then spread over nothing, and does not count; nor does it when
        all of them were dropped.

        Args:
            space: The space.
            surrogate: The model.
            observations: All that was learned.
            ended: Distinct strategies other than the default among them.
        """
        if surrogate.has_cost_model:
            return 0
        if not surrogate.experts and not surrogate.dropped:
            return self.initial_points
        if surrogate.experts and (ended < _ADVICE or _improved(space, observations)):
            return 0
        return self.initial_points + _ADVICE


def _improved(space: SearchSpace, observations: Sequence[Observation]) -> bool:
    """Whether something was clearly faster than the default, where that was measured."""
    measured = [(space.complete(o.strategy), o.log_step) for o in observations if o.measured]
    default = [log_step for strategy, log_step in measured if strategy == space.default]
    return not default or min(log_step for _, log_step in measured) < min(default) - _CLEARLY


def _from_model(
    problem: Problem,
    surrogate: Surrogate,
    observations: Sequence[Observation],
    pending: Sequence[Strategy],
    seed: int,
) -> Suggestion | None:
    """The model's suggestion; ``None`` when all its candidates are taken."""
    space = problem.space
    tried = encode_all(space, [seen.strategy for seen in observations])
    measurable = feasibility(space, observations)

    def chance(points: FloatArray) -> FloatArray:
        return measurable(points) * _usable(problem, points)

    def log_utility(points: FloatArray, log_step: FloatArray) -> FloatArray:
        """An improvement counts if it can be had, and per second of its trial."""
        trial_s = _OVERHEAD_S + problem.steps * np.exp(log_step)
        log_utility: FloatArray = np.log(chance(points)) - np.log(trial_s)
        return log_utility

    call = np.random.SeedSequence([seed, len(observations), len(pending)])
    # What has crashed still has the step time that was expected of it: nobody need beat that.
    measured = np.array([seen.measured for seen in observations], dtype=bool)
    incumbents = measured & (_usable(problem, tried) >= _RIVAL)
    found = propose(
        surrogate,
        tried,
        encode_all(space, pending),
        int(call.generate_state(1)[0] >> 1),
        log_utility,
        incumbents,
    )
    if found is None:
        return None
    point, acquisition = found
    there = surrogate.inputs(point[np.newaxis])
    info = _explain(surrogate, there, acquisition)
    can_be = float(chance(point[np.newaxis])[0])
    gain = 1.0  # nothing can be used yet: anything that can is worth its whole step
    if incumbents.any():
        gain = expected_gain(surrogate, surrogate.inputs(tried[incumbents]), there)
    info["expected_gain"] = can_be * gain
    return Suggestion(space.decode(point), "model", info)


def _usable(problem: Problem, points: FloatArray) -> FloatArray:
    """The chance that what stands at ``points`` may be used, not told below a hundredth."""
    if problem.feasible is None:
        return np.ones(len(points))
    return np.maximum(problem.feasible(points), _LEAST)


def _explain(surrogate: Surrogate, there: Tensor, acquisition: float) -> dict[str, Any]:
    """The suggestion's ``info``: the predicted step time with its 90 % interval, seconds.

    Args:
        surrogate: The model.
        there: Its inputs at the strategy, one row.
        acquisition: Its score.
    """
    expected, covariance = surrogate.joint_of(there)
    mean, deviation = float(expected[0]), math.sqrt(max(float(covariance[0, 0]), 0.0))
    return {
        "predicted_step_s": math.exp(mean),
        "predicted_low_s": math.exp(mean - HALF_WIDTH_90 * deviation),
        "predicted_high_s": math.exp(mean + HALF_WIDTH_90 * deviation),
        "acquisition": acquisition,
        "experts": [expert.name for expert in surrogate.experts],
        "dropped": _dropped(surrogate),
    }


def _dropped(surrogate: Surrogate) -> list[list[str | float]]:
    """Who is not heard, and by how much the leave-one-out score rose without each."""
    return [[name, round(rise, 3)] for name, rise in surrogate.dropped.items()]
