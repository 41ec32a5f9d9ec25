"""The stopping criterion: the share of a step that the next trial is expected to save."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.special import log_ndtr
from torch import Tensor

from hvd_autosync.learner.surrogate import Surrogate

#: Standard deviations of the logarithm of a step time below this count as none.
_CERTAIN = 1e-9


def expected_gain(surrogate: Surrogate, tried: Tensor, point: Tensor) -> float:
    """Return the share of the incumbent's step time that a trial at ``point`` is expected to save.

    The incumbent is the tried strategy with the lowest posterior mean.

    Args:
        surrogate: The fitted model.
        tried: The model's inputs at the measured strategies, at least one row.
        point: The model's inputs at another point, one row.
    """
    best = int(np.argmin(surrogate.mean_of(tried)))
    mean, covariance = surrogate.joint_of(torch.cat([tried[best : best + 1], point]))
    variance = float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    return expected_saving(float(mean[0] - mean[1]), math.sqrt(max(variance, 1e-12)))


def expected_saving(gain: float, deviation: float) -> float:
    """Return the share of a step's time that the second of two strategies is expected to save.

    Let d be the logarithm of the first step time minus that of the second, normal with mean m and
    standard deviation s. The share is 1 - exp(-max(d, 0)), and its expectation
    Phi(m / s) - exp(s^2 / 2 - m) Phi(m / s - s).

    Args:
        gain: m; above 0 the second strategy is expected to be faster.
        deviation: s, at least 0.
    """
    if deviation < _CERTAIN:
        return -math.expm1(-max(gain, 0.0))
    faster = float(log_ndtr(gain / deviation))
    left = deviation**2 / 2 - gain + float(log_ndtr(gain / deviation - deviation))
    # The logarithms of the two terms: their difference would be lost if both are tiny.
    return math.exp(faster) * -math.expm1(min(left - faster, 0.0))
