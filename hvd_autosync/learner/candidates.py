"""Which tried strategies are worth confirming."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from hvd_autosync.learner.gp import fit
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.problem import Problem
from hvd_autosync.learner.surrogate import Surrogate
from hvd_autosync.search_space import Strategy

#: A strategy is worth measuring again when its chance to beat the reference is at least this.
_WORTH = 0.1


def worth_confirming(
    problem: Problem,
    observations: Sequence[Observation],
    reference: Strategy,
    count: int,
    surrogate: Surrogate | None = None,
) -> list[Strategy]:
    """The measured strategies that may well be faster than ``reference``, best first.

    The reference was perhaps measured once, at a lucky moment: that it leads is no proof. So all
    are worth it that the model does not believe to be slower with confidence.

    Args:
        problem: The space, and what is known of it.
        observations: All that was learned so far.
        reference: A strategy that is complete in the space, usually the default.
        count: How many strategies are wanted.
        surrogate: The model fitted to these observations, where the caller has it.
    """
    surrogate = surrogate or fit(problem, observations)
    ranked = best_tried(problem, observations, len(observations), surrogate)
    return [
        strategy
        for strategy in ranked
        if strategy != reference and _chance(surrogate, strategy, reference) >= _WORTH
    ][:count]


def _chance(surrogate: Surrogate, strategy: Strategy, reference: Strategy) -> float:
    """Probability that ``strategy`` is faster than ``reference``."""
    mean, covariance = surrogate.joint([strategy, reference])
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    return NormalDist(mean[0] - mean[1], math.sqrt(max(variance, 1e-12))).cdf(0.0)


def best_tried(
    problem: Problem,
    observations: Sequence[Observation],
    count: int,
    surrogate: Surrogate | None = None,
) -> list[Strategy]:
    """The measured strategies that the model believes to be fastest.

    They are ranked by posterior mean: the luckiest observation is slower than it looked, and
    neighbours and repetitions tell by how much. The default has no privilege.

    Args:
        problem: The space, and what is known of it.
        observations: All that was learned so far.
        count: How many strategies are wanted.
        surrogate: The model fitted to these observations, where the caller has it.

    Returns:
        At most ``count`` distinct strategies, complete in the space, best first.
    """
    measured = dict.fromkeys(problem.space.complete(s.strategy) for s in observations if s.measured)
    if not measured:
        return []
    surrogate = surrogate or fit(problem, observations)
    strategies = list(measured)
    order = np.argsort(surrogate.predict(strategies)[0], kind="stable")
    return [strategies[index] for index in order[:count]]
