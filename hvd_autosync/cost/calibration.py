"""Fits the cost model's factors to trials of a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from hvd_autosync.cost.coefficients import Coefficients
from hvd_autosync.cost.cost_model import CostModel
from hvd_autosync.cost.timeline import FloatArray
from hvd_autosync.search_space import Value

#: Standard deviations of the factors' logarithms before any trial, and of what remains unexplained.
_PRIOR = np.array([0.7, 0.3, 0.7, 0.3, 1.0])
_MISFIT = 0.1
_STEPS, _DIFFERENCE = 12, 0.02


@dataclass(frozen=True)
class Calibration:
    """What trials have taught.

    Attributes:
        coefficients: The most likely factors.
        covariance: Of their logarithms, by Laplace's approximation, shape ``(5, 5)``.
        misfit: Standard deviation of the logarithm of measured over predicted step times, believed
            to be a tenth before any trial.
    """

    coefficients: Coefficients
    covariance: FloatArray
    misfit: float

    def draws(self, count: int, seed: int) -> list[Coefficients]:
        """Factors that are as likely as the trials leave them."""
        normal = np.random.default_rng(seed).standard_normal((count, len(self.covariance)))
        root = np.linalg.cholesky(self.covariance)
        points = np.array(astuple(self.coefficients)) + normal @ root.T
        return [Coefficients(*point) for point in points]


def calibrate(
    model: CostModel, strategies: Sequence[Mapping[str, Value]], step_s: Sequence[float]
) -> Calibration:
    """The most likely factors, by damped Gauss-Newton steps on the logarithm of the step time.

    Args:
        model: The cost model of the task.
        strategies: What was tried; none leaves what is believed before.
        step_s: Measured step times, seconds, each above 0.
    """
    measured = np.log(np.asarray(step_s, dtype=np.float64))

    def predicted(point: FloatArray) -> FloatArray:
        return np.log(model.predict(strategies, Coefficients(*point)))

    def loss(point: FloatArray) -> float:
        residual = (predicted(point) - measured) / _MISFIT
        return float(residual @ residual + ((point / _PRIOR) ** 2).sum())

    point, damping = np.zeros(len(_PRIOR)), 1e-2
    least = loss(point)
    for _ in range(_STEPS if len(measured) else 0):
        slopes = _slopes(predicted, point)
        precision = slopes.T @ slopes / _MISFIT**2 + np.diag(1 / _PRIOR**2)
        gradient = slopes.T @ (measured - predicted(point)) / _MISFIT**2 - point / _PRIOR**2
        damped = precision + damping * np.diag(np.diag(precision))
        candidate = point + np.linalg.solve(damped, gradient)
        reached = loss(candidate)
        if reached < least:
            point, least, damping = candidate, reached, damping / 3
        else:
            damping *= 4
    precision = np.diag(1 / _PRIOR**2)
    misfit = _MISFIT
    if len(measured):
        slopes = _slopes(predicted, point)
        precision = precision + slopes.T @ slopes / _MISFIT**2
        # As if there had been as many trials more as there are factors, with the usual misfit.
        squares = ((predicted(point) - measured) ** 2).sum() + len(point) * _MISFIT**2
        misfit = float(np.sqrt(squares / (len(measured) + len(point))))
    return Calibration(Coefficients(*point), np.linalg.inv(precision), misfit)


def _slopes(function: Callable[[FloatArray], FloatArray], point: FloatArray) -> FloatArray:
    """Derivatives at ``point`` by differences, shape ``(n, 5)``."""
    base = function(point)
    steps = _DIFFERENCE * np.eye(len(point))
    columns = [(function(point + step) - base) / _DIFFERENCE for step in steps]
    return np.stack(columns, axis=1)
