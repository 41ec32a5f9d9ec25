"""Source selection: drop the related tasks that cause negative transfer.

Backward elimination by leave-one-out cross-validation: a source is dropped if the model predicts
each trial from the others better without it.

``n``: number of observations; ``m``: basis functions of a prior function.
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

#: Fewest observations for source selection.
FEWEST_TO_JUDGE = 3
#: Least rise of the leave-one-out score, a log density, for which sources are dropped.
_CLEARLY = 0.5
#: Prior variance of the model's constant, in the model's unit
#: (:class:`hvd_autosync.learner.kernel.PriorMean`).
_CONSTANT_VARIANCE = 1.0


def sources_to_drop(
    model: SingleTaskGP, priors: Sequence[PriorFunction], first: int
) -> dict[str, float]:
    """Return the prior functions without which the model predicts clearly better.

    The score of a model is the sum of the log densities of all observations, each predicted from
    the others, with the hyperparameters as fitted and the constant integrated out (Rasmussen and
    Williams 2006, sections 2.7 and 5.4.2). Prior functions are removed one by one, always the one
    whose removal gives the highest score, until none is left. The set with the highest score on
    this path is kept, if its score is clearly above that of the full set. The path goes to its
    end because two sources that predict the same can hide each other's error: removing only one of
    them changes little.

    Args:
        model: The model fitted with all prior functions; their basis functions are its last inputs.
        priors: All prior functions.
        first: Index of the first one that may be dropped.

    Returns:
        Name of each dropped prior function -> rise of the score at its removal, in the order of
        removal.
    """
    removed: list[str] = []
    scores: list[float] = []
    with isolated(), torch.no_grad():
        inputs = model.train_inputs[0]
        widths = [len(prior.prior_mean) for prior in priors]
        columns = inputs[:, inputs.shape[1] - sum(widths) :].split(widths, dim=1)
        basis = dict(zip(priors, columns, strict=True))
        covariance = model.covar_module.forward(inputs, inputs) + model.likelihood.noise.diag()
        covariance = covariance + _CONSTANT_VARIANCE
        residual = model.train_targets - sum(z @ _mean(prior) for prior, z in basis.items())
        left = list(priors[first:])
        try:
            scores.append(loo_score(covariance, residual))
            while left:
                reduced = [_without(covariance, residual, each, basis[each]) for each in left]
                without = [loo_score(*one) for one in reduced]
                worst = max(range(len(left)), key=lambda index: without[index])
                covariance, residual = reduced[worst]
                scores.append(without[worst])
                removed.append(left.pop(worst).name)
        except NotPSDError:
            pass  # the path ends here: the scores of smaller sets cannot be computed
    best = max(range(len(scores)), key=lambda count: scores[count], default=0)
    if not scores or scores[best] < scores[0] + _CLEARLY:
        return {}
    return {name: scores[count + 1] - scores[count] for count, name in enumerate(removed[:best])}


def _without(
    covariance: Tensor, residual: Tensor, prior: PriorFunction, basis: Tensor
) -> tuple[Tensor, Tensor]:
    """Covariance, ``n x n``, and residual, ``(n,)``, of the model without ``prior``.

    Args:
        covariance: That of the model with it, ``n x n``.
        residual: That of the model with it, ``(n,)``.
        prior: The prior function to remove.
        basis: Its basis functions at the observations, ``n x m``.
    """
    scaled = basis * torch.tensor(prior.prior_std, dtype=basis.dtype)
    return covariance - scaled @ scaled.T, residual + basis @ _mean(prior)


def _mean(prior: PriorFunction) -> Tensor:
    return torch.tensor(prior.prior_mean, dtype=torch.float64)


def loo_score(covariance: Tensor, residual: Tensor) -> float:
    """Leave-one-out score: the sum of the log densities of ``n`` values given the others.

    Args:
        covariance: Covariance of the values, noise included, shape ``n x n``.
        residual: The values minus their mean, shape ``(n,)``.
    """
    inverse = torch.cholesky_inverse(psd_safe_cholesky(covariance))
    precision = inverse.diagonal()
    error = inverse @ residual / precision
    density = 0.5 * (precision.log() - precision * error.square() - math.log(2 * math.pi))
    return float(density.sum())
