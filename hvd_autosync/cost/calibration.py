"""Calibration: fits the cost model's factors to trials of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from hvd_autosync.cost.coefficients import Coefficients
from hvd_autosync.cost.columns import Columns
from hvd_autosync.cost.cost_model import CostModel
from hvd_autosync.cost.phases import Phases
from hvd_autosync.cost.timeline import FloatArray
from hvd_autosync.search_space import Value

#: Prior standard deviations of the factors' logarithms, in the order of :class:`Coefficients`.
PRIOR_DEVIATIONS = np.array([0.7, 0.3, 0.7, 0.3, 0.7, 1.0])
#: Prior standard deviation of the log residual.
_MISFIT = 0.1
_STEPS, _DIFFERENCE = 12, 0.02
#: The iteration ends if a step improves the loss, a sum of squared standardized residuals, by less.
_SMALL = 1e-3


@dataclass(frozen=True)
class Calibration:
    """The calibrated factors.

    Attributes:
        coefficients: The most likely factors.
        covariance: Covariance of their logarithms by Laplace's approximation, shape ``(6, 6)``.
        misfit: Standard deviation of the logarithm of measured over predicted step times, 0.1
            before any trial.
    """

    coefficients: Coefficients
    covariance: FloatArray
    misfit: float

    def draws(self, count: int, seed: int) -> list[Coefficients]:
        """Draw ``count`` sets of factors from the posterior."""
        normal = np.random.default_rng(seed).standard_normal((count, len(self.covariance)))
        root = np.linalg.cholesky(self.covariance)
        points = np.array(astuple(self.coefficients)) + normal @ root.T
        return [Coefficients(*point) for point in points]


def calibrate(
    model: CostModel, strategies: Sequence[Mapping[str, Value]], step_s: Sequence[float]
) -> Calibration:
    """Return the most likely factors, by damped Gauss-Newton steps on the log step time.

    Args:
        model: The cost model of the task.
        strategies: The tried strategies; without any the result is the prior.
        step_s: Their measured step times, seconds, each above 0.
    """
    measured = np.log(np.asarray(step_s, dtype=np.float64))
    steps = model.phases(Columns.of(strategies))
    precision = np.diag(1 / PRIOR_DEVIATIONS**2)

    def loss(point: FloatArray, predicted: FloatArray) -> float:
        residual = (predicted - measured) / _MISFIT
        return float(residual @ residual + point @ precision @ point)

    point, damping = np.zeros(len(PRIOR_DEVIATIONS)), 1e-2
    predicted, slopes = _linearized(steps, point)
    least = loss(point, predicted)
    for _ in range(_STEPS if len(measured) else 0):
        curvature = precision + slopes.T @ slopes / _MISFIT**2
        gradient = slopes.T @ (measured - predicted) / _MISFIT**2 - precision @ point
        damped = curvature + damping * np.diag(np.diag(curvature))
        candidate = point + np.linalg.solve(damped, gradient)
        there, slopes_there = _linearized(steps, candidate)
        reached = loss(candidate, there)
        if not reached < least:  # also true for NaN
            damping *= 4
            continue
        small = least - reached < _SMALL
        point, predicted, slopes, least = candidate, there, slopes_there, reached
        damping /= 3
        if small:
            break
    misfit = _MISFIT
    if len(measured):
        # Shrink towards the prior misfit, which counts as many trials as there are factors.
        squares = ((predicted - measured) ** 2).sum() + len(point) * _MISFIT**2
        misfit = float(np.sqrt(squares / (len(measured) + len(point))))
    covariance = np.linalg.inv(precision + slopes.T @ slopes / _MISFIT**2)
    return Calibration(Coefficients(*point), covariance, misfit)


def _linearized(steps: Phases, point: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the log step times at ``point``, ``(n,)``, and their slopes, ``(n, 6)``."""
    moved = [point, *(point + _DIFFERENCE * np.eye(len(point)))]
    log_s = np.log(steps.seconds([Coefficients(*each) for each in moved]))
    return log_s[0], (log_s[1:] - log_s[0]).T / _DIFFERENCE
