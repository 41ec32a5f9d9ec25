"""Whether going on promises anything: what the next trial is expected to save."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from hvd_autosync.learner.surrogate import Surrogate

_NORMAL = NormalDist()


def expected_gain(surrogate: Surrogate, tried: Tensor, point: Tensor) -> float:
    """Share of the present best's step time that trying a point is expected to save.

    The present best is the tried strategy with the lowest posterior mean.

    Args:
        surrogate: The fitted model.
        tried: The model's inputs at the measured strategies, at least one row.
        point: Those at another point, one row.
    """
    best = int(np.argmin(surrogate.mean_of(tried)))
    mean, covariance = surrogate.joint_of(torch.cat([tried[best : best + 1], point]))
    variance = float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    return expected_saving(float(mean[0] - mean[1]), math.sqrt(max(variance, 1e-12)))


def expected_saving(gain: float, deviation: float) -> float:
    """Share of a step's time that the faster of two strategies is expected to save.

    With d the difference of the two logarithms, normal with mean m and deviation s, the expectation
    of max(d, 0) is m Phi(m / s) + s phi(m / s) (Jones et al. 1998).

    Args:
        gain: m, by how much the second is expected to be faster.
        deviation: s, above 0.
    """
    expected = gain * _NORMAL.cdf(gain / deviation) + deviation * _NORMAL.pdf(gain / deviation)
    return -math.expm1(-max(expected, 0.0))
