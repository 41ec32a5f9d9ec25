"""The tried strategies that are fastest, and those that are worth confirming."""

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

#: Least probability to be faster than the reference, and least expected saving as a share of a
#: step, for which a strategy is worth measuring again.
_WORTH, _LEAST_SAVING = 0.1, 0.01


def worth_confirming(
    problem: Problem,
    observations: Sequence[Observation],
    reference: Strategy,
    count: int,
    surrogate: Surrogate | None = None,
) -> list[Strategy]:
    """Return the measured strategies that may well be faster than ``reference``, best first.

    The reference may have been measured only once, at a lucky moment, so its lead is no proof.
    A strategy is left out only if it is very likely slower than the reference, or hardly faster.

    Args:
        problem: The space, and what is known before the first trial.
        observations: The outcomes of all trials so far.
        reference: A strategy that is complete in the space, usually the default.
        count: Largest number of strategies to return.
        surrogate: The model fitted to these observations, if the caller has it.

    Raises:
        SpaceError: A strategy does not lie in the space.
    """
    surrogate = surrogate or fit(problem, observations)
    ranked = best_tried(problem, observations, len(observations), surrogate)
    gains, deviations = _gains(surrogate, ranked, reference)
    worth = [
        strategy
        for strategy, gain, deviation in zip(ranked, gains, deviations, strict=True)
        if strategy != reference
        and norm.cdf(gain / deviation) >= _WORTH
        and expected_saving(float(gain), float(deviation)) >= _LEAST_SAVING
    ]
    return worth[:count]


def expected_savings(
    surrogate: Surrogate, strategies: Sequence[Strategy], reference: Strategy
) -> list[float]:
    """Return the share of the reference's step that each strategy is expected to save."""
    gains, deviations = _gains(surrogate, strategies, reference)
    return [expected_saving(float(m), float(s)) for m, s in zip(gains, deviations, strict=True)]


def _gains(
    surrogate: Surrogate, strategies: Sequence[Strategy], reference: Strategy
) -> tuple[FloatArray, FloatArray]:
    """Log ratios of the step time of ``reference`` to that of each strategy.

    Returns:
        Means and standard deviations, ``(n,)`` each; above 0 the strategy is faster.
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
    """Return the measured strategies with the lowest predicted step times.

    They are ranked by posterior mean: the fastest observation is partly luck, and neighbours and
    repetitions show how much. The default is treated like any other strategy.

    Args:
        problem: The space, and what is known before the first trial.
        observations: The outcomes of all trials so far.
        count: Largest number of strategies to return.
        surrogate: The model fitted to these observations, if the caller has it.

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
