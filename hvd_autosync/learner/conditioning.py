"""Gaussian conditioning: a Gaussian process given measured values, and each value given the others.

Rasmussen and Williams 2006, algorithm 2.1, for a prior mean and a covariance function that the
caller evaluates: here they are a residual and matrices. ``n``: number of measured values; ``m``:
number of points; ``g``: number of residuals with the same covariance, such as those of several
prior means. All tensors are doubles. Results are differentiable in all arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """The distribution of each value given the others (Rasmussen and Williams, section 5.4.2).

    Attributes:
        mean: Means of the values minus their prior means, shape ``(n,)`` or ``n x g``.
        variance: Variances of the values, noise included, shape ``(n,)``.
        score: Sum of the log densities of the values, shape ``()`` or ``(g,)``.
    """

    mean: Tensor
    variance: Tensor
    score: Tensor


class Conditioning:
    """The posterior of a Gaussian process given ``n`` values, from one Cholesky factor.

    Args:
        covariance: Prior covariance of the values, noise included, shape ``n x n``.
        residual: The values minus their prior mean, shape ``(n,)``; or ``n x g``, then every result
            that depends on the values has a last dimension ``g``.

    Raises:
        NotPSDError: The covariance is not positive definite, even with some jitter.
        NanError: The covariance is not a number somewhere.
    """

    def __init__(self, covariance: Tensor, residual: Tensor) -> None:
        self._factor = psd_safe_cholesky(covariance)
        self._residual = residual

    @cached_property
    def weights(self) -> Tensor:
        """The inverse covariance times the residual, shape ``(n,)`` or ``n x g``."""
        columns = self._residual if self._residual.dim() == 2 else self._residual.unsqueeze(-1)
        return torch.cholesky_solve(columns, self._factor).reshape(self._residual.shape)

    def mean(self, cross: Tensor) -> Tensor:
        """Return the posterior mean minus the prior mean, shape ``(m,)`` or ``m x g``.

        Args:
            cross: Prior covariances of the points with the measured values, ``m x n``.
        """
        return cross @ self.weights

    def covariance(self, prior: Tensor, cross: Tensor) -> Tensor:
        """Return the posterior covariance of the points, ``m x m``.

        Args:
            prior: Their prior covariance, ``m x m``.
            cross: As for :meth:`mean`.
        """
        explained = self._explained(cross)
        return prior - explained.mT @ explained

    def variance(self, prior: Tensor, cross: Tensor) -> Tensor:
        """Return the posterior variance of each point, ``(m,)``; at least 0.

        Args:
            prior: Their prior variances, ``(m,)``.
            cross: As for :meth:`mean`.
        """
        return (prior - self._explained(cross).square().sum(dim=0)).clamp_min(0.0)

    @cached_property
    def leave_one_out(self) -> LeaveOneOut:
        """Each value given the others."""
        precision = torch.cholesky_inverse(self._factor).diagonal()
        by_column = precision.unsqueeze(-1) if self._residual.dim() == 2 else precision
        error = self.weights / by_column
        density = 0.5 * (by_column.log() - by_column * error.square() - math.log(2 * math.pi))
        return LeaveOneOut(self._residual - error, precision.reciprocal(), density.sum(dim=0))

    @cached_property
    def log_density(self) -> Tensor:
        """Logarithm of the marginal density of the values, shape ``()`` or ``(g,)``."""
        quadratic = (self._residual * self.weights).sum(dim=0)
        scale = self._factor.diagonal().log().sum()
        constant = 0.5 * len(self._residual) * math.log(2 * math.pi)
        density: Tensor = -0.5 * quadratic - scale - constant
        return density

    def _explained(self, cross: Tensor) -> Tensor:
        """Return the covariances with the independent parts of the values, ``n x m``."""
        explained: Tensor = torch.linalg.solve_triangular(self._factor, cross.mT, upper=False)
        return explained
