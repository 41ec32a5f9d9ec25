"""Which experts mislead: without whom each trial is predicted better from the others.

``n``: number of observations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from botorch.models import SingleTaskGP
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.prior_functions import PriorFunction

#: Fewest observations that can speak against an expert.
FEWEST_TO_JUDGE = 3
#: What they must gain without it, in logarithms of probability.
_CLEARLY = 0.5
#: Variance of the model's constant before anything is known, in its unit (:class:`PriorMean`).
_CONSTANT_VARIANCE = 1.0


def sources_to_drop(
    model: SingleTaskGP, experts: Sequence[PriorFunction], first: int
) -> dict[str, float]:
    """The experts without whom the model predicts clearly better.

    The score of a model is the sum of the log densities of all observations, each predicted from
    the others, with hyperparameters as they are and the constant integrated out (Rasmussen and
    Williams 2006, sections 2.7 and 5.4.2). The expert whose absence raises it most goes first, and
    so on to the last; where on this way the score is highest, and clearly higher than with all,
    those before are dropped. Two who say the same cannot cover each other that way.

    Args:
        model: Fitted with all experts, whose predictions are its last inputs.
        experts: All of them.
        first: The first one that may be dropped; those before stay.

    Returns:
        Their names, in the order in which they go -> by how much the score rises then.
    """
    gone: list[str] = []
    scores: list[float] = []
    with isolated(), torch.no_grad():
        inputs = model.train_inputs[0]
        widths = [len(expert.weights) for expert in experts]
        columns = inputs[:, inputs.shape[1] - sum(widths) :].split(widths, dim=1)
        said = dict(zip(experts, columns, strict=True))
        covariance = model.covar_module.forward(inputs, inputs) + model.likelihood.noise.diag()
        covariance = covariance + _CONSTANT_VARIANCE
        residual = model.train_targets - sum(z @ _weights(e) for e, z in said.items())
        left = list(experts[first:])
        try:
            scores.append(loo_score(covariance, residual))
            while left:
                rivals = [_without(covariance, residual, e, said[e]) for e in left]
                without = [loo_score(*rival) for rival in rivals]
                worst = max(range(len(left)), key=lambda index: without[index])
                covariance, residual = rivals[worst]
                scores.append(without[worst])
                gone.append(left.pop(worst).name)
        except NotPSDError:
            pass  # nothing can be told of the others
    best = max(range(len(scores)), key=lambda count: scores[count], default=0)
    if not scores or scores[best] < scores[0] + _CLEARLY:
        return {}
    return {name: scores[count + 1] - scores[count] for count, name in enumerate(gone[:best])}


def _without(
    covariance: Tensor, residual: Tensor, expert: PriorFunction, said: Tensor
) -> tuple[Tensor, Tensor]:
    """Covariance, ``n x n``, and residual, ``(n,)``, of a model that does not hear ``expert``."""
    unsure = said * torch.tensor(expert.deviations, dtype=said.dtype)
    return covariance - unsure @ unsure.T, residual + said @ _weights(expert)


def _weights(expert: PriorFunction) -> Tensor:
    return torch.tensor(expert.weights, dtype=torch.float64)


def loo_score(covariance: Tensor, residual: Tensor) -> float:
    """Sum of the log densities of each of ``n`` values, predicted from the others.

    Args:
        covariance: Of the values, noise included, shape ``n x n``.
        residual: The values less their mean, shape ``(n,)``.
    """
    inverse = torch.cholesky_inverse(psd_safe_cholesky(covariance))
    precision = inverse.diagonal()
    error = inverse @ residual / precision
    density = 0.5 * (precision.log() - precision * error.square() - math.log(2 * math.pi))
    return float(density.sum())
