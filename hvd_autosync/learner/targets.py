"""From observations to what the model is fitted to.

``n``: number of observations, at least 1. All in natural logarithms of seconds until they are
standardized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import BoolArray, FloatArray

#: How much strategies differ before anything is known: step times within about 25 %.
_EXPECTED_SPREAD = 0.25
#: How many observations that expectation weighs.
_EXPECTATION_WEIGHT = 2.0
#: A failed trial is taken to be slower than the slowest measured one by at least this.
_FAILURE_MARGIN = 0.1


@dataclass(frozen=True)
class Targets:
    """What the model is fitted to.

    Attributes:
        log_step: Logarithm of the step times, failures imputed, shape ``(n,)``.
        variance: Known noise variance of each, shape ``(n,)``.
        center: Subtracted before the model sees them.
        scale: The model's unit.
    """

    log_step: FloatArray
    variance: FloatArray
    center: float
    scale: float

    @classmethod
    def of(cls, observations: Sequence[Observation]) -> Targets:
        """The targets of ``observations``, of which there is at least one.

        The unit is the observations' standard deviation, shrunk towards what is expected when
        they are few, so that one observation gives a sensible model and equal ones a narrow one.
        """
        measured = np.array([seen.measured for seen in observations], dtype=np.bool_)
        log_step = np.array([seen.log_step for seen in observations])
        variance = np.array([seen.log_variance for seen in observations])
        _impute_failures(log_step, variance, measured)
        center = float(log_step.mean())
        squares = float(((log_step - center) ** 2).sum())
        squares += _EXPECTATION_WEIGHT * _EXPECTED_SPREAD**2
        scale = math.sqrt(squares / (len(log_step) - 1 + _EXPECTATION_WEIGHT))
        return cls(log_step, variance, center, scale)


def _impute_failures(log_step: FloatArray, variance: FloatArray, measured: BoolArray) -> None:
    """Give failed trials a pessimistic and uncertain step time, in place.

    They are set beyond the slowest measured one by the spread of the measured ones: enough to
    lead away from where trials fail, too little to drown the differences among those that do not.
    """
    times = log_step[measured] if measured.any() else np.zeros(1)
    margin = max(float(times.std()), _FAILURE_MARGIN)
    log_step[~measured] = times.max() + margin
    variance[~measured] = (margin / 2) ** 2
