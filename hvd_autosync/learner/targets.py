"""From observations to what the model is fitted to.

``n``: number of observations with a time, at least 1. All in natural logarithms of seconds until
they are standardized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import FloatArray

#: How many observations the expected spread weighs.
_EXPECTATION_WEIGHT = 2.0


@dataclass(frozen=True)
class Targets:
    """What the model is fitted to.

    Attributes:
        log_step: Logarithm of the step times, shape ``(n,)``.
        variance: Known noise variance of each, shape ``(n,)``.
        center: The level of the step times where experts say 0, that is, of the default.
        scale: The model's unit.
    """

    log_step: FloatArray
    variance: FloatArray
    center: float
    scale: float

    @classmethod
    def of(
        cls, observations: Sequence[Observation], expected: FloatArray, spread: float
    ) -> Targets:
        """The targets of ``observations``, all of them measured and at least one.

        The unit is the standard deviation of what experts do not explain, shrunk towards what is
        expected when observations are few, so that one of them gives a sensible model and equal
        ones a narrow one.

        Args:
            observations: The measured ones.
            expected: What experts say of their strategies, shape ``(n,)``.
            spread: How much strategies differ from that before anything is known.
        """
        log_step = np.array([seen.log_step for seen in observations])
        variance = np.array([seen.log_variance for seen in observations])
        unexplained = log_step - expected
        center = float(unexplained.mean())
        squares = float(((unexplained - center) ** 2).sum())
        squares += _EXPECTATION_WEIGHT * spread**2
        scale = math.sqrt(squares / (len(log_step) - 1 + _EXPECTATION_WEIGHT))
        return cls(log_step, variance, center, scale)
