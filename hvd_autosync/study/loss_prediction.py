"""Prediction of the losses of a guarded training, from the quality trials of its job.

Each trial has its own seed, and so its own data and initialization. Let m_s(w) be the mean loss of
window w in the trial of seed s, for n seeds. A new training that is as good has the mean
mu(w) = mean of m_s(w) over s, with the variance (1 + 1/n) v(w)::

    v(w) = (c a(w) + b(w)) / 2,   c = max(1, mean over w of b(w) / a(w))

a(w) is the variance of a window's mean estimated from its steps (von Neumann's mean square of
successive differences, which a falling loss does not inflate); it has many degrees of freedom, but
misses the variance between seeds. b(w) is the variance of m_s(w) over the seeds, with n - 1 degrees
of freedom. An effect of the seed that is common to all windows inflates v(w) by the variance of the
trials' cumulated deviations, if that is above 1. The prediction ends with the shortest of the
trials; those with less than half of the median of their steps are left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hvd_autosync.search_space.trial import LOSS_WINDOW, LossPrediction
from hvd_autosync.study.quality_trial import fall_of

#: Share of the tolerance that is allowed to a strategy without an admitting verdict.
_UNPROVEN = 0.5


def predict_losses(
    default: Sequence[Sequence[float]], own: Sequence[Sequence[float]] = (), tolerance: float = 0.01
) -> LossPrediction:
    """Predict the losses of a training under a lossy strategy that is as good as the default.

    Args:
        default: Losses of the steps of the default's trials, one sequence for each seed.
        own: Losses of the strategy's own trials, if it was admitted: they are allowed, too.
        tolerance: Allowed loss above the default's, as a share of the decrease of the default's.

    Returns:
        A prediction for each window of ``LOSS_WINDOW`` steps of the trials; without windows if the
        trials do not suffice.
    """
    nothing = LossPrediction()
    default, own = _long_enough(default), _long_enough(own)
    count = min((len(losses) for losses in default), default=0) // LOSS_WINDOW
    everything = [loss for losses in (*default, *own) for loss in losses]
    if len(default) < 2 or not count or not all(map(math.isfinite, everything)):
        return nothing
    means = [_means(losses)[:count] for losses in default]
    levels = [statistics.fmean(window) for window in zip(*means, strict=True)]
    variances = _variances(default, means)
    if not all(variances):
        return nothing  # a variance of 0: equal losses carry no information on the noise
    margin = tolerance * max(statistics.fmean(fall_of(losses).mean for losses in default), 0.0)
    if own:
        longest = min(count, *(len(_means(losses)) for losses in own))
        for window in range(longest):
            judged = statistics.fmean(_means(losses)[window] for losses in own)
            levels[window] = max(levels[window], judged)
    else:
        margin *= _UNPROVEN
    factor = (1 + 1 / len(default)) * _inflation(means, variances)
    return LossPrediction(
        tuple(level + margin for level in levels),
        tuple(math.sqrt(factor * variance) for variance in variances),
    )


def _long_enough(trials: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Return the trials without those that were cut short, which would end the prediction."""
    least = statistics.median(map(len, trials)) / 2 if trials else 0
    return [losses for losses in trials if len(losses) >= least]


def _means(losses: Sequence[float]) -> list[float]:
    """Return the mean of each whole window."""
    last = len(losses) - LOSS_WINDOW + 1
    return [statistics.fmean(losses[i : i + LOSS_WINDOW]) for i in range(0, last, LOSS_WINDOW)]


def _variances(trials: Sequence[Sequence[float]], means: Sequence[Sequence[float]]) -> list[float]:
    """Return v(w) of the module, for each window."""
    within, between = [], []
    for window, of_seeds in enumerate(zip(*means, strict=True)):
        start = window * LOSS_WINDOW
        squares = [
            (losses[step + 1] - losses[step]) ** 2 / 2
            for losses in trials
            for step in range(start, start + LOSS_WINDOW - 1)
        ]
        within.append(statistics.fmean(squares) / LOSS_WINDOW)
        between.append(statistics.variance(of_seeds))
    known = [b / a for a, b in zip(within, between, strict=True) if a]
    ratio = max(1.0, statistics.fmean(known)) if known else 1.0
    return [(ratio * a + b) / 2 for a, b in zip(within, between, strict=True)]


def _inflation(means: Sequence[Sequence[float]], variances: Sequence[float]) -> float:
    """Return the variance of the trials' summed deviations over the expected one; at least 1."""
    scores = []
    for own in means:
        deviations = [
            mean - statistics.fmean(seeds)
            for mean, seeds in zip(own, zip(*means, strict=True), strict=True)
        ]
        scores.append(math.fsum(deviations) / math.sqrt(math.fsum(variances)))
    return max(1.0, math.fsum(score**2 for score in scores) / (len(scores) - 1))
