"""Mean and covariance of the model over numeric and categorical inputs and experts' predictions.

Shapes as in :mod:`hvd_autosync.learner.features`: inputs are ``n x (p + c + e)``, numeric first,
the ``e`` numbers that experts say last.

With M the Matern-5/2 kernel of the numeric inputs, one length scale each, and H the product of
``exp(-rate_i)`` over the categorical inputs that differ::

    k = w_0 M + w_1 H + w_2 M H + sum_j s_j^2 z_j z_j'

Numbers and categories act by themselves and together, as in BoTorch's ``MixedSingleTaskGP``
[Balandat2020]_; there, sum and product have length scales of their own, here they share them:
half the parameters, which matters with 20 observations, and less than half the time.

The last sum says that number z_j of an expert is believed with a weight that is normal around m_j
with deviation s_j; the mean is then a constant plus the sum of m_j z_j (Rasmussen and Williams
2006, section 2.7). The posterior corrects the weights without fitting them, so that one
trial against an expert is enough to believe it less.

.. [Balandat2020] M. Balandat et al., "BoTorch: A Framework for Efficient Monte-Carlo Bayesian
   Optimization", NeurIPS 2020.
.. [Hvarfner2024] C. Hvarfner et al., "Vanilla Bayesian Optimization Performs Great in High
   Dimensions", ICML 2024: length scales that grow with the square root of the dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from gpytorch.priors import NormalPrior
from torch import Tensor
from torch.nn import Parameter

_SQRT5 = math.sqrt(5.0)
#: Medians of the priors: a length scale in one dimension (it grows with the root of the number of
#: inputs) and the rates of all inputs together, were all of them categories. Chosen on synthetic
#: step times so that 90 % intervals after 5 to 30 trials hold the truth most often without losing
#: accuracy.
_LENGTHSCALE, _RATE = 0.3, 2.5
#: Standard deviation of every logarithm. A wider one for the weights lets a model of 10 trials
#: take signal for noise, which costs regret.
_DEVIATION = 1.0


class PriorMean(Mean):  # type: ignore[misc]
    """A constant plus what experts predict, times how much of it is believed.

    Args:
        weights: Of the experts, shape ``(e,)``.
    """

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("_weights", weights)
        self.register_parameter("constant", Parameter(torch.zeros((), dtype=torch.float64)))
        self.register_prior("constant_prior", NormalPrior(0.0, 1.0), "constant")

    def forward(self, x: Tensor) -> Tensor:
        """The mean at ``x``, ``batch_shape x n x (p + c + e)``: ``batch_shape x n``."""
        experts = x[..., x.shape[-1] - len(self._weights) :]
        mean: Tensor = self.constant + experts @ self._weights
        return mean


class MixedKernel(Kernel):  # type: ignore[misc]
    """See the module; parameters are logarithms, with normal priors.

    Args:
        numeric_count: Number of numeric inputs, ``p``.
        categorical_count: Number of categorical inputs, ``c``.
        deviations: Standard deviations of the experts' weights, shape ``(e,)``.
    """

    def __init__(
        self, numeric_count: int, categorical_count: int, deviations: Tensor | None = None
    ) -> None:
        super().__init__()
        self._numeric_count = numeric_count
        self._knob_count = numeric_count + categorical_count
        self.register_buffer("_deviations", torch.empty(0) if deviations is None else deviations)
        total = max(numeric_count + categorical_count, 1)
        parameters = {
            "log_lengthscale": (numeric_count, _LENGTHSCALE * math.sqrt(total)),
            "log_rate": (categorical_count, _RATE / total),
            "log_weight": (3, 1 / 3),
        }
        for name, (count, typical) in parameters.items():
            start = torch.full((count,), math.log(typical), dtype=torch.float64)
            self.register_parameter(name, Parameter(start))
            prior = NormalPrior(start.clone(), torch.full_like(start, _DEVIATION))
            self.register_prior(f"{name}_prior", prior, name)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: Any) -> Tensor:
        """Covariance of ``x1`` and ``x2``.

        Args:
            x1: ``batch_shape x n x (p + c + e)``.
            x2: ``batch_shape x m x (p + c + e)``.
            diag: Whether only the covariances of equal rows are wanted (n = m).

        Returns:
            ``batch_shape x n x m``, or ``batch_shape x n`` when ``diag``.
        """
        p, knobs = self._numeric_count, self._knob_count
        weight = self.log_weight.exp()
        if diag:
            x1, x2 = x1.unsqueeze(-2), x2.unsqueeze(-2)
        scale = (-self.log_lengthscale).exp()
        r = _SQRT5 * torch.cdist(
            x1[..., :p] * scale, x2[..., :p] * scale, compute_mode="donot_use_mm_for_euclid_dist"
        )
        matern = (1 + r + r.square() / 3) * torch.exp(-r)
        differs = (x1[..., p:knobs].unsqueeze(-2) != x2[..., p:knobs].unsqueeze(-3)).to(x1)
        hamming = torch.exp(-(differs @ self.log_rate.exp()))
        covariance: Tensor = weight[0] * matern + weight[1] * hamming + weight[2] * matern * hamming
        if len(self._deviations):
            heard = self._deviations.square() * x1[..., knobs:]
            covariance = covariance + heard @ x2[..., knobs:].transpose(-1, -2)
        return covariance.squeeze(-1).squeeze(-1) if diag else covariance
