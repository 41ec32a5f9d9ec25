"""Model of the metric as a function of the share, fitted to the runs so far.

The metric of a run at share f is a Gaussian process around a curve that rises and saturates, like
the published ones (Sync-Switch, Li et al., ICDCS 2021: most of the accuracy is reached in the first
part of the work)::

    m(f) = b - A (h(f) - h(1)) / (1 - h(1)) + r(f) + noise,      h(f) = 1 / (1 + (f / k)^p)

A >= 0 is the loss of the metric at f = 0; k and p are the position and the steepness of the rise;
r is the residual. The level b has a wide normal prior, so it is part of the covariance. A, k, p and
the noise have priors on a grid and are integrated out, each cell weighted by its likelihood
(Rasmussen and Williams 2006, sections 2.2, 2.7 and 5.2). The unit is the tolerance, which
is of the order of the noise of runs. ``n``: runs; ``c``: shares; ``g``: curves of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from hvd_autosync.recurring.outcomes import Goal, RecurringOutcome

FloatArray: TypeAlias = npt.NDArray[np.float64]

#: The grid: A and the noise (with its prior weights) in tolerances, the knee k, the steepness p.
_COSTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_NOISES, _NOISE_PRIOR = (0.125, 0.25, 0.5, 1.0, 2.0), (1.0, 2.0, 3.0, 2.0, 0.5)
_KNEES = tuple(np.geomspace(0.01, 1.0, 9))
_POWERS = (1.5, 3.0, 6.0, 12.0)
#: Prior standard deviation of r and its length scale in units of :func:`_place`; standard deviation
#: of b.
_REST, _LENGTH, _LEVEL = 0.25, 0.5, 100.0
#: The metric of a failed run is taken so many tolerances below the lowest one and the bound.
_FAILED = 2.0


def keeps(
    outcomes: Sequence[RecurringOutcome], goal: Goal, shares: FloatArray, known: bool
) -> FloatArray:
    """Return the probability that each share keeps the target.

    Args:
        outcomes: The runs so far, at least one.
        goal: The goal of the search.
        shares: The shares, shape ``(c,)``.
        known: Whether the target was given. Otherwise it is the mean metric at f = 1, which is
            known only up to the noise of the runs there.

    Returns:
        Shape ``(c,)``.
    """
    # Torch is loaded here, so that a job without a Bayesian search starts without it.
    import torch

    from hvd_autosync.learner.conditioning import Conditioning

    if not known:  # a failure there tells nothing of a share, and the target is of the others
        outcomes = [each for each in outcomes if each.finite or each.share < 1]
    unit = max(goal.tolerance, 1e-4 * abs(goal.target), 1e-12)
    lowest = min([goal.bound, *(each.metric for each in outcomes if each.finite)])
    metrics = [e.metric if e.finite else lowest - _FAILED * unit for e in outcomes]
    seen = (np.array(metrics) - goal.target) / unit  # (n,)
    tried = np.array([each.share for each in outcomes])
    # The constraint: m(f) - m(1) >= -tolerance, or m(f) >= target - tolerance.
    ends = np.ones(1)
    means = _curves(tried), _curves(shares) - (0.0 if known else _curves(ends))  # (n, g), (c, g)
    level = 0.0 if known else 1.0
    own = _covariance(shares, shares).diagonal() + level * (
        _covariance(ends, ends)[0, 0] - 2 * _covariance(shares, ends)[:, 0]
    )
    variances = torch.from_numpy(own)  # (c,)
    across = torch.from_numpy(_covariance(shares, tried) - level * _covariance(ends, tried))
    residual = torch.from_numpy(seen[:, None] - means[0])
    likelihoods, answers = [], []
    for noise, prior in zip(_NOISES, _NOISE_PRIOR, strict=True):
        covariance = _covariance(tried, tried) + noise**2 * np.eye(len(tried))
        process = Conditioning(torch.from_numpy(covariance), residual)
        mean = means[1] + process.mean(across).numpy()  # (c, g)
        deviation = np.sqrt(np.maximum(process.variance(variances, across).numpy(), 1e-12))
        bound = -goal.tolerance / unit
        answers.append(ndtr((mean - bound) / deviation[:, None]))
        likelihoods.append(process.log_density.numpy() + math.log(prior))
    weights = np.array(likelihoods)  # (noises, g)
    weights = np.exp(weights - weights.max())
    found: FloatArray = np.einsum("ng,ncg->c", weights / weights.sum(), np.array(answers))
    return found


def _curves(shares: FloatArray) -> FloatArray:
    """Return the curves of the grid at ``shares``, without their level: ``(c, g)``."""
    columns = []
    for knee in _KNEES:
        for power in _POWERS:
            h, end = 1 / (1 + (shares / knee) ** power), 1 / (1 + (1 / knee) ** power)
            columns += [-cost * (h - end) / (1 - end) for cost in _COSTS]
    return np.stack(columns, axis=1)


def _place(shares: FloatArray) -> FloatArray:
    """Return the positions of shares for the kernel of r, on a logarithmic scale."""
    place: FloatArray = np.log(shares + 0.05)
    return place


def _covariance(one: FloatArray, other: FloatArray) -> FloatArray:
    """Return the covariance of b + r, a Matern-5/2 kernel: ``(len(one), len(other))``."""
    r = math.sqrt(5) / _LENGTH * np.abs(_place(one)[:, None] - _place(other)[None, :])
    covariance: FloatArray = _LEVEL**2 + _REST**2 * (1 + r + r**2 / 3) * np.exp(-r)
    return covariance
