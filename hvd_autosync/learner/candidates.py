"""Which tried strategies are worth confirming."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import norm

from hvd_autosync.learner.gp import fit
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import FloatArray
from hvd_autosync.learner.problem import Problem
from hvd_autosync.learner.stopping import expected_saving
from hvd_autosync.learner.surrogate import Surrogate
from hvd_autosync.search_space import Strategy

#: A strategy is worth measuring again when its chance to beat the reference is at least this, and
#: the share of a step that it is expected to save.
_WORTH, _LEAST_SAVING = 0.1, 0.01


def worth_confirming(
    problem: Problem,
    observations: Sequence[Observation],
    reference: Strategy,
    count: int,
    surrogate: Surrogate | None = None,
) -> list[Strategy]:
    """The measured strategies that may well be faster than ``reference``, best first.

    The reference was perhaps measured once, at a lucky moment: that it leads is no proof. So all
    are worth it that the model does not believe to be slower with confidence, or hardly faster.

    Args:
        problem: The space, and what is known of it.
        observations: All that was learned so far.
        reference: A strategy that is complete in the space, usually the default.
        count: How many strategies are wanted.
        surrogate: The model fitted to these observations, where the caller has it.

    Raises:
        SpaceError: A strategy does not lie in the space.
    """
    surrogate = surrogate or fit(problem, observations)
    ranked = best_tried(problem, observations, len(observations), surrogate)
    gains, deviations = _gains(surrogate, ranked, reference)
    log_utility = [
        strategy
        for strategy, gain, deviation in zip(ranked, gains, deviations, strict=True)
        if strategy != reference
        and norm.cdf(gain / deviation) >= _WORTH
        and expected_saving(float(gain), float(deviation)) >= _LEAST_SAVING
    ]
    return log_utility[:count]


def expected_savings(
    surrogate: Surrogate, strategies: Sequence[Strategy], reference: Strategy
) -> list[float]:
    """Share of the reference's step that each of ``strategies`` is expected to save."""
    gains, deviations = _gains(surrogate, strategies, reference)
    return [expected_saving(float(m), float(s)) for m, s in zip(gains, deviations, strict=True)]


def _gains(
    surrogate: Surrogate, strategies: Sequence[Strategy], reference: Strategy
) -> tuple[FloatArray, FloatArray]:
    """By how much each of ``strategies`` is faster than ``reference``, as logarithms ``(n,)``.

    Means and standard deviations.
    """
    mean, covariance = surrogate.joint([reference, *strategies])
    variance = covariance[0, 0] + np.diagonal(covariance) - 2 * covariance[0]
    return (mean[0] - mean)[1:], np.sqrt(np.maximum(variance, 1e-12))[1:]


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

    Raises:
        SpaceError: A strategy does not lie in the space.
    """
    measured = dict.fromkeys(problem.space.complete(s.strategy) for s in observations if s.measured)
    if not measured:
        return []
    surrogate = surrogate or fit(problem, observations)
    strategies = list(measured)
    order = np.argsort(surrogate.predict(strategies)[0], kind="stable")
    return [strategies[index] for index in order[:count]]
