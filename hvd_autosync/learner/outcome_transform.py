"""The outcome transform: from observations to standardized log step times.

``n``: number of measured observations, at least 1; ``e``: number of basis functions. Times are
natural logarithms of seconds until they are standardized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from botorch.models.transforms.outcome import Standardize

from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import FloatArray
from hvd_autosync.search_space import Strategy

#: The expected spread counts as much as so many observations.
_EXPECTATION_WEIGHT = 2.0


@dataclass(frozen=True)
class StepTimes:
    """The step times of trials, and how they are standardized.

    Attributes:
        log_step: Logarithm of the step times, shape ``(n,)``.
        variance: Known noise variance of each, shape ``(n,)``.
        center: Log step time where all prior functions are 0, that is, of the default.
        scale: The model's unit: the standard deviation of the residual.
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
        prior_mean: FloatArray,
        prior_std: FloatArray,
        spread: float,
    ) -> StepTimes:
        """Return the step times of ``observations``.

        The scale is the expected root mean square of the residual, shrunk towards ``spread`` when
        observations are few: one observation gives a sensible model, equal ones a narrow one. The
        residual is taken at the posterior means of the weights. With the prior means an
        anti-correlated source would inflate the scale and never be rejected. Strategies count, each
        at the mean of its observations: many of one do not show that others differ little.

        Args:
            observations: Measured observations, at least one.
            design_matrix: Basis functions at their strategies, ``n x e``.
            prior_mean: Prior means of the weights, shape ``(e,)``.
            prior_std: Prior standard deviations of the weights, ``(e,)``.
            spread: Prior standard deviation of the residual.
        """
        log_step = np.array([seen.log_step for seen in observations])
        variance = np.array([seen.log_variance for seen in observations])
        average = _average_by_strategy(observations)
        basis, mean = average @ design_matrix, average @ log_step
        weights, covariance = _weight_posterior(
            basis, prior_mean, prior_std, mean, average**2 @ variance + spread**2
        )
        residual = mean - basis @ weights
        center = float(residual.mean())
        squares = float(((residual - center) ** 2).sum())
        centered = basis - basis.mean(axis=0)
        squares += float(((centered @ covariance) * centered).sum())  # uncertainty of the weights
        squares += _EXPECTATION_WEIGHT * spread**2
        scale = math.sqrt(squares / (len(mean) - 1 + _EXPECTATION_WEIGHT))
        return cls(log_step, variance, center, scale)


def _average_by_strategy(observations: Sequence[Observation]) -> FloatArray:
    """Return the matrix that averages values of ``n`` observations by strategy, ``s x n``."""
    rows: dict[Strategy, int] = {}
    row_of = [rows.setdefault(seen.strategy, len(rows)) for seen in observations]
    belongs = np.zeros((len(rows), len(observations)))
    belongs[row_of, range(len(observations))] = 1.0
    average: FloatArray = belongs / belongs.sum(axis=1, keepdims=True)
    return average


def _weight_posterior(
    design_matrix: FloatArray,
    prior_mean: FloatArray,
    prior_std: FloatArray,
    log_step: FloatArray,
    variance: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Posterior mean, ``(e,)``, and covariance, ``e x e``, of the weights.

    Bayesian linear regression with a free intercept (Rasmussen and Williams 2006, section 2.1).
    """
    count = len(prior_mean)
    precision, prior_precision = 1 / np.sqrt(variance), 1 / prior_std  # square roots
    rows = np.block(
        [
            [design_matrix * precision[:, np.newaxis], precision[:, np.newaxis]],
            [np.diag(prior_precision), np.zeros((count, 1))],
        ]
    )
    values = np.concatenate([log_step * precision, prior_mean * prior_precision])
    inverse = np.linalg.pinv(rows)
    return (inverse @ values)[:count], (inverse @ inverse.T)[:count, :count]


class StepTimeTransform(Standardize):
    """The outcome transform: standardizes log step times by a given center and scale.

    BoTorch's ``Standardize`` takes mean and deviation of the outcomes; ours are expected ones
    (:class:`StepTimes`). The rest of a model is in the same unit, so a state with another center or
    scale is not loaded.

    Args:
        center: What is subtracted.
        scale: What is divided by.
    """

    def __init__(self, center: float, scale: float) -> None:
        super().__init__(m=1)
        self.means = torch.full((1, 1), center, dtype=torch.float64)
        self.stdvs = torch.full((1, 1), scale, dtype=torch.float64)
        self._stdvs_sq = self.stdvs.square()
        self._is_trained = torch.tensor(True)
        self.eval()

    @property
    def center(self) -> float:
        """What is subtracted, in logarithms of seconds."""
        return float(self.means)

    @property
    def scale(self) -> float:
        """The model's unit, in logarithms of seconds."""
        return float(self.stdvs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("means", "stdvs"):
            given, own = state_dict.get(prefix + name), getattr(self, name)
            if given is not None and not torch.equal(given, own):
                errors: list[str] = rest[-1]
                errors.append(
                    f"{prefix}{name} is {given.tolist()}, here {own.tolist()}: other trials"
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def train(self, mode: bool = True) -> StepTimeTransform:
        """Stay as made: new outcomes change neither center nor scale."""
        super().train(False)
        return self
