"""The learner of a survey: covers a space and its best corner instead of looking for a point."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvd_autosync.cost import calibrate
from hvd_autosync.cost.columns import Columns
from hvd_autosync.learner import Observation, SobolLearner, Suggestion
from hvd_autosync.learner.points import distinct, encode_all, keys, sobol_points
from hvd_autosync.learner.pool import one_knob_away
from hvd_autosync.learner.prior_functions import cost_model_of
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import Strategy

#: Shares of the trials: evenly spread ones; the best by the calibrated cost model; neighbours of
#: the fastest; the rest repeats some.
_SPREAD, _PROMISING, _NEAR = 0.5, 0.2, 0.2
_LOOKED_AT = 4096
#: The fastest strategies whose neighbours are tried, and by how much numbers change.
_FASTEST, _STEPS = 5, (0.2, 0.06)


class SurveyLearner:
    """Proposes the strategies of a survey of ``trials`` trials.

    Unlike other learners it proposes some strategies again: their spread is the noise.
    """

    name = "survey"

    def __init__(self, trials: int) -> None:
        self._trials = trials

    def suggest(
        self,
        problem: Problem,
        observations: Sequence[Observation],
        pending: Sequence[Strategy] = (),
        *,
        seed: int,
    ) -> Suggestion | None:
        """See :class:`hvd_autosync.learner.base.Learner`."""
        done = len(observations) / self._trials
        found = None
        if done >= _SPREAD + _PROMISING + _NEAR:
            found = _again(observations)
        elif done >= _SPREAD + _PROMISING:
            found = _near(problem, observations, seed)
        elif done >= _SPREAD:
            found = _promising(problem, observations, seed)
        if found is None:
            suggestion = SobolLearner().suggest(problem, observations, pending, seed=seed)
            found = None if suggestion is None else suggestion.strategy
        return None if found is None else Suggestion(found, "survey")


def _promising(problem: Problem, observations: Sequence[Observation], seed: int) -> Strategy | None:
    """One of the untried strategies that are fastest by the cost model."""
    space = problem.space
    model = cost_model_of(problem.task)
    if model is None:
        return None
    fixed = dict(space.fixed)
    seen = [one for one in observations if one.measured]
    strategies = [{**fixed, **one.strategy} for one in seen]
    calibrated = calibrate(model, strategies, [math.exp(one.log_step) for one in seen])
    rng = np.random.default_rng([seed, len(observations)])
    tried = keys(encode_all(space, [seen.strategy for seen in observations]))
    pool = distinct(sobol_points(space, _LOOKED_AT, int(rng.integers(2**31))), tried)
    (step_s,) = model.seconds(Columns.at(space, pool), [calibrated.coefficients])
    best = np.argsort(step_s, kind="stable")[:20]
    return space.decode(pool[rng.choice(best)]) if len(best) else None


def _near(problem: Problem, observations: Sequence[Observation], seed: int) -> Strategy | None:
    """An untried strategy one knob away from one of the fastest."""
    space = problem.space
    measured = sorted((o for o in observations if o.measured), key=lambda o: o.log_step)
    points = encode_all(space, [seen.strategy for seen in observations])
    best = encode_all(space, [seen.strategy for seen in measured[:_FASTEST]])
    neighbours = distinct(one_knob_away(space, best, _STEPS), keys(points))
    rng = np.random.default_rng([seed, len(observations)])
    return space.decode(neighbours[rng.integers(len(neighbours))]) if len(neighbours) else None


def _again(observations: Sequence[Observation]) -> Strategy:
    """One of the strategies measured before, fast and slow ones in turn."""
    measured = sorted((o for o in observations if o.measured), key=lambda o: o.log_step)
    # Steps of the golden ratio visit all ranks evenly, however many there will be.
    return measured[int(len(measured) * (0.618 * len(observations) % 1))].strategy
