"""What the losses of a guarded training may be, predicted from the quality trials of its job.

Each trial has another seed, and so other data and another initialization. With m_s(w) the mean
loss of window w in the trial of seed s, n seeds, a new training that is as good has the mean
mu(w) = mean of m_s(w) over s, with the variance (1 + 1/n) v(w)::

    v(w) = (c a(w) + b(w)) / 2,   c = max(1, mean over w of b(w) / a(w))

a(w) is the variance of a window's mean by its steps (von Neumann's mean square of successive
differences, which a falling loss does not inflate), b(w) that of m_s(w) over the seeds: the first
has many degrees of freedom and does not see what seeds make of a window, the second has n - 1. What
a seed makes of all windows alike inflates v(w) by the variance of the trials' own cumulated
deviations, where that is above 1. The prediction ends with the trials.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hvd_autosync.search_space.trial import LOSS_WINDOW, LossPrediction

#: Steps of a trial that are its beginning, and its end, as shares of all: between these a loss has
#: fallen.
_BEGINNING, _END = 0.05, 0.25
#: A strategy that was never shown to be as good may be worse by this share of the tolerance.
_UNPROVEN = 0.5


def predict_losses(
    default: Sequence[Sequence[float]], own: Sequence[Sequence[float]] = (), tolerance: float = 0.01
) -> LossPrediction:
    """The losses of a training under a lossy strategy that is as good.

    Args:
        default: Losses of the steps of the default's trials, one sequence for each seed.
        own: The same of the strategy's own trials, where it was admitted: as it was then it may be.
        tolerance: Loss above the default's that is tolerated, as a share of what that has fallen.

    Returns:
        For each window of ``LOSS_WINDOW`` steps of the trials; without windows where there is too
        little to judge by.
    """
    nothing = LossPrediction()
    count = min((len(losses) for losses in default), default=0) // LOSS_WINDOW
    everything = [loss for losses in (*default, *own) for loss in losses]
    if len(default) < 2 or not count or not all(map(math.isfinite, everything)):
        return nothing
    means = [_means(losses)[:count] for losses in default]
    levels = [statistics.fmean(window) for window in zip(*means, strict=True)]
    variances = _variances(default, means)
    if not all(variances):
        return nothing  # equal losses of all seeds say nothing of their noise
    margin = tolerance * max(statistics.fmean(map(_fall, default)), 0.0)
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


def _means(losses: Sequence[float]) -> list[float]:
    """Of each whole window."""
    last = len(losses) - LOSS_WINDOW + 1
    return [statistics.fmean(losses[i : i + LOSS_WINDOW]) for i in range(0, last, LOSS_WINDOW)]


def _fall(losses: Sequence[float]) -> float:
    """What a loss has fallen by."""
    first, last = (max(int(share * len(losses)), 1) for share in (_BEGINNING, _END))
    return statistics.fmean(losses[:first]) - statistics.fmean(losses[-last:])


def _variances(trials: Sequence[Sequence[float]], means: Sequence[Sequence[float]]) -> list[float]:
    """v(w) of the module, for each window."""
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
    """Variance of the trials' deviations, summed over all windows, in its units; at least 1."""
    scores = []
    for own in means:
        deviations = [
            mean - statistics.fmean(seeds)
            for mean, seeds in zip(own, zip(*means, strict=True), strict=True)
        ]
        scores.append(math.fsum(deviations) / math.sqrt(math.fsum(variances)))
    return max(1.0, math.fsum(score**2 for score in scores) / (len(scores) - 1))
