"""Which experts mislead, by how well the others predict each trial from the rest without them.

``n``: number of observations; ``e``: number of experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from botorch.models import SingleTaskGP
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from hvd_autosync.learner.experts import Expert

#: Fewest observations that can speak against an expert, and what they must gain without it, in
#: logarithms of probability.
_FEWEST, _CLEARLY = 3, 0.5


def loo_gains(model: SingleTaskGP, experts: Sequence[Expert]) -> list[float]:
    """How much better the model predicts with each expert than without it.

    The score is the sum of the logarithms of the densities of all observations, each predicted
    from the others, with hyperparameters as they are (Rasmussen and Williams 2006, section 5.4.2).

    Args:
        model: Fitted with all experts.
        experts: In the order of its last inputs.

    Returns:
        For each expert the score with it less the score without it; below 0 it misleads.
    """
    with torch.no_grad():
        inputs = model.train_inputs[0]
        covariance = model.covar_module.forward(inputs, inputs) + model.likelihood.noise.diag()
        residual = model.train_targets - model.mean_module(inputs)
        everything = _loo_score(covariance, residual)
        gains = []
        for expert, said in zip(experts, inputs[:, -len(experts) :].T, strict=True):
            without = covariance - expert.deviation**2 * torch.outer(said, said)
            gains.append(everything - _loo_score(without, residual + expert.weight * said))
    return gains


def misleads(gain: float, observations: int) -> bool:
    """Whether an expert with such a gain is better not heard."""
    return observations >= _FEWEST and gain < -_CLEARLY


def _loo_score(covariance: Tensor, residual: Tensor) -> float:
    """Sum of the log densities of each of ``n`` values, predicted from the others."""
    inverse = torch.cholesky_inverse(psd_safe_cholesky(covariance))
    precision = inverse.diagonal()
    error = inverse @ residual / precision
    density = 0.5 * (precision.log() - precision * error.square() - math.log(2 * math.pi))
    return float(density.sum())
