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
class OutcomeTransform:
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
        cls,
        observations: Sequence[Observation],
        design_matrix: FloatArray,
        weights: FloatArray,
        deviations: FloatArray,
        spread: float,
    ) -> OutcomeTransform:
        """The targets of ``observations``, all of them measured and at least one.

        The unit is the root of the mean square that is expected of what experts do not explain,
        shrunk towards what is believed when observations are few, so that one of them gives a
        sensible model and equal ones a narrow one. Experts are heard for it as much as the
        observations have taught: were one who says the opposite of the truth believed as before,
        the unit would be so large that what is open could be anything, and he would never be
        contradicted.

        Args:
            observations: The measured ones.
            opinions: What experts say of their strategies, ``n x e``.
            weights: How much of each number is believed before any trial, shape ``(e,)``.
            deviations: Standard deviations of that, ``(e,)``.
            spread: How much strategies differ from what experts say before anything is known.
        """
        log_step = np.array([seen.log_step for seen in observations])
        variance = np.array([seen.log_variance for seen in observations])
        believed, unsure = _weight_posterior(
            design_matrix, weights, deviations, log_step, variance + spread**2
        )
        unexplained = log_step - design_matrix @ believed
        center = float(unexplained.mean())
        squares = float(((unexplained - center) ** 2).sum())
        around = design_matrix - design_matrix.mean(axis=0)
        squares += float(((around @ unsure) * around).sum())  # what weights leave open
        squares += _EXPECTATION_WEIGHT * spread**2
        scale = math.sqrt(squares / (len(log_step) - 1 + _EXPECTATION_WEIGHT))
        return cls(log_step, variance, center, scale)


def _weight_posterior(
    design_matrix: FloatArray,
    weights: FloatArray,
    deviations: FloatArray,
    log_step: FloatArray,
    variance: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Mean, ``(e,)``, and covariance, ``e x e``, of the weights after the observations.

    A Bayesian linear regression with a free constant (Rasmussen and Williams 2006, section 2.1).
    """
    count = len(weights)
    precise, sure = 1 / np.sqrt(variance), 1 / deviations
    rows = np.block(
        [
            [design_matrix * precise[:, np.newaxis], precise[:, np.newaxis]],
            [np.diag(sure), np.zeros((count, 1))],
        ]
    )
    values = np.concatenate([log_step * precise, weights * sure])
    inverse = np.linalg.pinv(rows)
    return (inverse @ values)[:count], (inverse @ inverse.T)[:count, :count]
