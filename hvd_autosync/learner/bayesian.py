"""The default learner: Bayesian optimization, after a few Sobol points if there is no prior.

It maximizes the expected improvement per second of the trial [Snoek2012]_, times the probability
that the trial can be measured, times the probability that the strategy satisfies the quality
constraint.

.. [Snoek2012] J. Snoek et al., "Practical Bayesian Optimization of Machine Learning Algorithms",
   NeurIPS 2012, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
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
from hvd_autosync.learner.untried import excluded_keys, space_exhausted, usable
from hvd_autosync.search_space import SearchSpace, Strategy

#: Seconds of a trial beside its steps: between the 0.2 of a warm one and the 5 of a cold one
#: (benchmarks/trial_overhead.py).
_OVERHEAD_S = 1.0
#: Trials that source suggestions get to improve on the default; and the least improvement, in
#: logarithms of the step time.
_SOURCE_TRIALS, _CLEARLY = 2, 0.25
#: Least feasibility probability of an incumbent; and the lower bound of all probabilities.
_INCUMBENT, _LEAST = 0.5, 0.01


class BayesianLearner:
    """Bayesian optimization of the log step time.

    Args:
        initial_points: Number of distinct strategies other than the default that are tried (or
            pending) before the model proposes, if there are no prior functions. Two more if two
            source suggestions brought no improvement. In any case the model proposes only after a
            first measured trial.
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
        excluded = excluded_keys(space, observations, pending)
        if space_exhausted(space, excluded):
            return None
        surrogate = fit(problem, observations)
        default = excluded_keys(space, (), [space.default])
        ended = len(excluded_keys(space, observations, ()) - default)
        wanted = self._initial_points(space, surrogate, observations, ended)
        if len(excluded - default) >= wanted and any(seen.measured for seen in observations):
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
        """Return how many strategies must be tried or pending before the model proposes.

        With a cost model it is 0. With related tasks it is 0 as well, until two source suggestions
        brought no improvement: a source that is wrong about a distant region is not refuted by
        trials of its own suggestions. Initial points then cover the space. The two suggestions
        do not count as such, because they do not cover it; nor if all sources were dropped.

        Args:
            space: The space.
            surrogate: The model.
            observations: The outcomes of all trials so far.
            ended: Number of distinct strategies other than the default among them.
        """
        if surrogate.has_cost_model:
            return 0
        if not surrogate.priors and not surrogate.dropped:
            return self.initial_points
        if surrogate.priors and (ended < _SOURCE_TRIALS or _improved(space, observations)):
            return 0
        return self.initial_points + _SOURCE_TRIALS


def _improved(space: SearchSpace, observations: Sequence[Observation]) -> bool:
    """Return whether one was clearly faster than the default, or the default was not measured."""
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
    """Return the model's suggestion; ``None`` if all its candidates are tried or pending."""
    space = problem.space
    tried = encode_all(space, [seen.strategy for seen in observations])
    measurable = feasibility(space, observations)

    def probability(points: FloatArray) -> FloatArray:
        return measurable(points) * _feasible(problem, points)

    def log_utility(points: FloatArray, log_step: FloatArray) -> FloatArray:
        """Probability that an improvement can be used, per second of the trial; its logarithm."""
        trial_s = _OVERHEAD_S + problem.steps * np.exp(log_step)
        utility: FloatArray = np.log(probability(points)) - np.log(trial_s)
        return utility

    call = np.random.SeedSequence([seed, len(observations), len(pending)])
    # The model predicts a step time for strategies that failed, too; they are no incumbents.
    measured = np.array([seen.measured for seen in observations], dtype=bool)
    incumbents = measured & (_feasible(problem, tried) >= _INCUMBENT)
    found = propose(
        surrogate,
        tried,
        encode_all(space, pending),
        int(call.generate_state(1)[0] >> 1),
        log_utility,
        incumbents,
        partial(usable, problem),
    )
    if found is None:
        return None
    point, acquisition = found
    there = surrogate.inputs(point[np.newaxis])
    info = _explain(surrogate, there, acquisition)
    likely = float(probability(point[np.newaxis])[0]) * usable(problem, point[np.newaxis])[0]
    gain = 1.0  # without an incumbent, a usable strategy gains its whole step
    if incumbents.any():
        gain = expected_gain(surrogate, surrogate.inputs(tried[incumbents]), there)
    info["expected_gain"] = float(likely * gain)
    return Suggestion(space.decode(point), "model", info)


def _feasible(problem: Problem, points: FloatArray) -> FloatArray:
    """Feasibility probability of ``points``, shape ``(n,)``; at least 0.01 for its logarithm."""
    if problem.feasible is None:
        return np.ones(len(points))
    return np.maximum(problem.feasible(points), _LEAST)


def _explain(surrogate: Surrogate, there: Tensor, acquisition: float) -> dict[str, Any]:
    """Return the suggestion's ``info``; step times and their 90 % interval are in seconds.

    Args:
        surrogate: The model.
        there: The model's inputs at the strategy, one row.
        acquisition: The score of the strategy.
    """
    expected, covariance = surrogate.joint_of(there)
    mean, deviation = float(expected[0]), math.sqrt(max(float(covariance[0, 0]), 0.0))
    return {
        "predicted_step_s": math.exp(mean),
        "predicted_low_s": math.exp(mean - HALF_WIDTH_90 * deviation),
        "predicted_high_s": math.exp(mean + HALF_WIDTH_90 * deviation),
        "acquisition": acquisition,
        "priors": [prior.name for prior in surrogate.priors],
        "dropped": _dropped(surrogate),
    }


def _dropped(surrogate: Surrogate) -> list[list[str | float]]:
    """Names of the dropped prior functions, each with the rise of the leave-one-out score."""
    return [[name, round(rise, 3)] for name, rise in surrogate.dropped.items()]
