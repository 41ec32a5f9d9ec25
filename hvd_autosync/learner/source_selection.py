"""Source selection: drop the related tasks that cause negative transfer.

Backward elimination by leave-one-out cross-validation: a source is dropped if the model predicts
each trial from the others better without it.

``n``: number of observations.
"""

from __future__ import annotations

import torch
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from hvd_autosync.learner.conditioning import Conditioning
from hvd_autosync.learner.multi_task_gp import MultiTaskGP
from hvd_autosync.learner.numerics import isolated

#: Fewest observations for source selection.
FEWEST_TO_JUDGE = 3
#: Least rise of the leave-one-out score, a log density, for which sources are dropped.
_CLEARLY = 0.5
#: Prior variance of the model's constant, in the model's unit
#: (:class:`hvd_autosync.learner.multi_task_gp.MultiTaskMean`).
_CONSTANT_VARIANCE = 1.0


def sources_to_drop(model: MultiTaskGP, first: int) -> dict[str, float]:
    """Return the prior functions without which the model predicts clearly better.

    The score of a model is the sum of the log densities of all observations, each predicted from
    the others, with the hyperparameters as fitted and the constant integrated out (Rasmussen and
    Williams 2006, sections 2.7 and 5.4.2). Prior functions are removed one by one, always the one
    whose removal gives the highest score, until none is left. The set with the highest score on
    this path is kept, if its score is clearly above that of the full set. The path goes to its
    end because two sources that predict the same can hide each other's error: removing only one of
    them changes little.

    Args:
        model: The model fitted with all prior functions.
        first: Index of the first prior function that may be dropped.

    Returns:
        Name of each dropped prior function -> rise of the score at its removal, in the order of
        removal.
    """
    priors = model.input_transform.priors
    removed: list[str] = []
    scores: list[float] = []
    with isolated(), torch.no_grad():
        kernel, inputs = model.covar_module, model.train_inputs[0]
        residual = model.train_targets - model.mean_module(inputs) + model.mean_module.constant
        covariance = kernel.forward(inputs, inputs) + model.likelihood.noise.diag()
        covariance = covariance + _CONSTANT_VARIANCE
        parts = {
            index: (
                kernel.of_prior(index, inputs, inputs),
                model.mean_module.of_prior(index, inputs),
            )
            for index in range(first, len(priors))
        }
        left = list(parts)
        try:
            scores.append(_score(covariance, residual))
            while left:
                reduced = [(covariance - parts[i][0], residual + parts[i][1]) for i in left]
                without = [_score(*one) for one in reduced]
                worst = max(range(len(left)), key=lambda index: without[index])
                covariance, residual = reduced[worst]
                scores.append(without[worst])
                removed.append(priors[left.pop(worst)].name)
        except NotPSDError:
            pass  # the path ends here: the scores of smaller sets cannot be computed
    best = max(range(len(scores)), key=lambda count: scores[count], default=0)
    if not scores or scores[best] < scores[0] + _CLEARLY:
        return {}
    return {name: scores[count + 1] - scores[count] for count, name in enumerate(removed[:best])}


def _score(covariance: Tensor, residual: Tensor) -> float:
    return float(Conditioning(covariance, residual).leave_one_out.score)
