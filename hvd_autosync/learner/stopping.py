"""Whether going on promises anything: what the next trial is expected to save."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from hvd_autosync.learner.points import FloatArray
from hvd_autosync.learner.surrogate import Surrogate

_NORMAL = NormalDist()


def expected_gain(surrogate: Surrogate, tried: FloatArray, point: FloatArray) -> float:
    """Share of the present best's step time that trying ``point`` is expected to save.

    The present best is the tried strategy with the lowest posterior mean. With d the difference of
    the two logarithms, normal with mean m and deviation s, the expectation of max(d, 0) is
    m Phi(m / s) + s phi(m / s) (Jones et al. 1998).

    Args:
        surrogate: The fitted model.
        tried: Snapped points of the measured strategies, at least one, shape ``n x d``.
        point: Another snapped point, shape ``(d,)``.
    """
    best = tried[int(np.argmin(surrogate.mean_at(tried)))]
    mean, covariance = surrogate.joint_at(np.stack([best, point]))
    gain = float(mean[0] - mean[1])
    variance = float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    deviation = math.sqrt(max(variance, 1e-12))
    expected = gain * _NORMAL.cdf(gain / deviation) + deviation * _NORMAL.pdf(gain / deviation)
    return -math.expm1(-max(expected, 0.0))
