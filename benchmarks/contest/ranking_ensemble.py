"""RGPE as a contestant: an ensemble of one GP per task, weighted by how each ranks the trials.

M. Feurer, B. Letham, E. Bakshy, "Scalable Meta-Learning for Bayesian Optimization using
Ranking-Weighted Gaussian Process Ensembles", ICML AutoML workshop 2018. Each task has a
``SingleTaskGP`` of its own standardized speed. A model's loss is the number of pairs of the
target's trials that a sample of it ranks wrongly; the target's own model is judged by samples that
leave one trial out. The weight of a model is the probability that its loss is the smallest. A
related task whose median loss is above the 95th percentile of the target's has no weight.

``n``: trials of the target; ``d``: dimension of the space; ``k``: inputs of the models; ``s``:
samples; ``t``: models, the target's last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from contest.botorch_peers import OnPool, fitted, related_trials, single_task, zero_one
from contest.contestant import Contestant
from contest.emulator import Emulator
from hvd_autosync.learner.conditioning import Conditioning
from hvd_autosync.learner.points import FloatArray
from hvd_autosync.learner.problem import Source
from hvd_autosync.search_space import SearchSpace

_SAMPLES = 512
#: With fewer trials of the target there is too little to rank: related tasks weigh the same.
_FEWEST = 3
_QUANTILE = 0.95


class RankingEnsemble(Model):
    """A weighted sum of independent models.

    Args:
        models: The models, of the same inputs.
        weights: Their weights, shape ``(t,)``; models without a weight are left out.
    """

    def __init__(self, models: Sequence[SingleTaskGP], weights: Tensor) -> None:
        super().__init__()
        used = [index for index, weight in enumerate(weights.tolist()) if weight > 0]
        self._used = tuple(models[index] for index in used)
        self.models = torch.nn.ModuleList(self._used)
        self.weights = weights[used]

    @property
    def num_outputs(self) -> int:
        return 1

    @property
    def batch_shape(self) -> torch.Size:
        return torch.Size()

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """The posterior of the sum, without noise; see BoTorch's ``Model``."""
        if observation_noise is not False:
            raise NotImplementedError("the sum has no observations of its own")
        each = [_distribution(model, X) for model in self._used]
        mean = sum(w * one.mean for w, one in zip(self.weights, each, strict=True))
        covariance = sum(
            w.square() * one.covariance_matrix for w, one in zip(self.weights, each, strict=True)
        )
        # As an operator: jitter is added where candidates are near points of the baseline.
        posterior = GPyTorchPosterior(MultivariateNormal(mean, to_linear_operator(covariance)))
        return posterior if posterior_transform is None else posterior_transform(posterior)


class RankingEnsembles:
    """Makes the ensemble of a task's trials and its related tasks."""

    def __init__(self, space: SearchSpace, sources: Sequence[Source]) -> None:
        self._space, self._sources = space, sources

    def inputs(self, points: FloatArray) -> Tensor:
        return zero_one(self._space, points)

    def model(self, points: FloatArray, log_step: FloatArray) -> RankingEnsemble:
        x, speed = self.inputs(points), -torch.from_numpy(log_step)
        models = [*self._related, _standardized_model(x, speed)]
        return RankingEnsemble(models, ranking_weights(models, x, speed))

    @cached_property
    def _related(self) -> list[SingleTaskGP]:
        trials = [related_trials(source, self._space) for source in self._sources]
        return [_standardized_model(x, speed) for x, speed in trials]


def ranking_ensemble(table: Emulator, sources: tuple[Source, ...], seed: int) -> Contestant:
    """RGPE; without related tasks it is the task's own GP."""
    if not sources:
        return single_task(table, sources, seed)
    return OnPool(table.space, RankingEnsembles(table.space, sources), seed, initial=1)


@torch.no_grad()
def ranking_weights(models: Sequence[SingleTaskGP], x: Tensor, speed: Tensor) -> Tensor:
    """Weights of the models, shape ``(t,)``; their sum is 1.

    Args:
        models: Those of the related tasks, at least one, and that of the target.
        x: Inputs of the target's trials, ``n x k``.
        speed: Their measured speed, ``(n,)``.
    """
    if len(speed) < _FEWEST:
        weights = torch.full((len(models),), 1 / (len(models) - 1), dtype=torch.float64)
        weights[-1] = 0.0
        return weights
    losses = torch.stack([*(_loss(each, x, speed) for each in models[:-1]), _own(models[-1])])
    limit = losses[-1].quantile(_QUANTILE)
    dropped = losses.quantile(0.5, dim=1) > limit
    dropped[-1] = False
    best = losses.masked_fill(dropped.unsqueeze(-1), torch.inf)
    wins = (best == best.min(dim=0).values).double()  # (t, s)
    wins[:-1] *= 1 - wins[-1]  # in a tie with others the target's own model wins
    return (wins / wins.sum(dim=0)).mean(dim=1)


def misrankings(samples: Tensor, others: Tensor, speed: Tensor, other_speed: Tensor) -> Tensor:
    """How many pairs of a trial and another are ranked wrongly, shape ``(s,)``.

    Args:
        samples: Samples of a model at trials, ``s x n``.
        others: Samples at the trials that these are compared with, ``s x m``.
        speed: Measured speed of the former, ``(n,)``.
        other_speed: Measured speed of the latter, ``(m,)``.
    """
    predicted = samples.unsqueeze(-1) < others.unsqueeze(-2)
    measured = speed.unsqueeze(-1) < other_speed
    return (predicted ^ measured).sum(dim=(-2, -1)).double()


def _loss(model: SingleTaskGP, x: Tensor, speed: Tensor) -> Tensor:
    """Losses of a related task's model, ``(s,)``."""
    samples = model.posterior(x).rsample(torch.Size([_SAMPLES])).squeeze(-1)
    return misrankings(samples, samples, speed, speed)


def _own(model: SingleTaskGP) -> Tensor:
    """Losses of the target's model, ``(s,)``: each trial by the model of the others.

    The sample at the trial that is left out is compared with those at all others.
    """
    x, speed = model.train_inputs[0], model.train_targets
    prior, covariance = model.mean_module(x), model.covar_module(x).to_dense()
    noise = model.likelihood.noise * torch.eye(len(x), dtype=x.dtype)
    losses = torch.zeros(_SAMPLES, dtype=torch.float64)
    for trial in range(len(x)):
        others = torch.arange(len(x)) != trial
        left = Conditioning((covariance + noise)[others][:, others], (speed - prior)[others])
        cross = covariance[:, others]
        posterior = MultivariateNormal(prior + left.mean(cross), left.covariance(covariance, cross))
        samples = posterior.rsample(torch.Size([_SAMPLES]))
        losses += misrankings(samples[:, [trial]], samples, speed[[trial]], speed)
    return losses


def _distribution(model: SingleTaskGP, x: Tensor) -> MultivariateNormal:
    """The joint distribution of a model at inputs, ``b x q x k``, without noise."""
    posterior = model.posterior(x)
    assert isinstance(posterior, GPyTorchPosterior), "the models transform no outcomes"
    return posterior.distribution


def _standardized_model(x: Tensor, speed: Tensor) -> SingleTaskGP:
    """A fitted model of one task, of its speed minus the mean, in standard deviations."""
    deviation = float(speed.std()) if len(speed) > 1 else 0.0
    unit = deviation if deviation > 1e-6 else 1.0
    standardized = ((speed - speed.mean()) / unit).unsqueeze(-1)
    return fitted(SingleTaskGP(x, standardized, outcome_transform=None))
