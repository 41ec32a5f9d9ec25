"""The surrogate: a Gaussian process of the logarithm of the step time over one space.

``n``: number of observations or strategies; ``d``: dimension of the space. The GP sees *speed*,
minus the standardized logarithm of the step time, because BoTorch maximizes. It starts from what
experts predict (:mod:`hvd_autosync.learner.experts`): the cost model, and related tasks, each of
which is a model of its own; what they leave open is a GP of the knobs. So the target of this
multi-task GP is a weighted sum of its sources' functions and a function of its own, with the
sources' taken at their posterior means. Its noise is what each trial's own steps say
(heteroscedastic, known) plus what launches of one strategy differ by (homoscedastic, learned).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import cast

import numpy as np
import torch
from botorch.exceptions.errors import BotorchError
from botorch.models import SingleTaskGP
from botorch.optim.fit import fit_gpytorch_mll_scipy
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior
from gpytorch.settings import cholesky_jitter
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from hvd_autosync.learner.experts import COST_MODEL, Expert, cost_expert, opinions, source_expert
from hvd_autosync.learner.features import Features
from hvd_autosync.learner.kernel import ExpertMean, MixedKernel
from hvd_autosync.learner.misleading import loo_gains, misleads
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import FloatArray, encode_all
from hvd_autosync.learner.problem import Problem
from hvd_autosync.learner.targets import Targets
from hvd_autosync.search_space import Value

#: Most iterations of the fit; more change the likelihood little and cost most of the time.
_FIT_ITERATIONS = 75
#: Relative difference between launches of one strategy: most likely value, and the deviation of
#: the logarithm of its variance (0.4 % to 9 % lie within two of them). On machines that are
#: shared, 5 % and more were measured (benchmarks/README.md).
_RELAUNCH_NOISE, _RELAUNCH_DEVIATION = 0.02, 1.5
#: Smallest noise variances in the model's unit, for the factorization's sake.
_NOISE_FLOOR = 1e-6
_JITTERS = (1e-8, 1e-4)
#: How much strategies differ before anything is known: step times within about 25 %; and from what
#: experts say.
_SPREAD, _UNEXPLAINED_SPREAD = 0.25, 0.12
#: Standard deviation of a related task's weight.
_SOURCE_DEVIATION = 0.4


class Surrogate:
    """A fitted model of the log step time over one space; see :func:`fit`.

    Attributes:
        model: The BoTorch model; it takes :meth:`inputs` and predicts standardized speed.
        space: The space.
        experts: Whose predictions it starts from.
    """

    def __init__(
        self, model: SingleTaskGP, features: Features, experts: tuple[Expert, ...],
        targets: Targets,
    ) -> None:  # fmt: skip
        self.model = model
        self.space = features.space
        self.experts = experts
        self._features = features
        self._center = targets.center
        self._scale = targets.scale

    def inputs(self, points: FloatArray) -> Tensor:
        """The model's inputs at points, ``n x d``: shape ``n x (p + c + e)``."""
        return _inputs(self._features, self.experts, points, self._scale)

    def mean_at(self, points: FloatArray) -> FloatArray:
        """Mean of the latent log step time at points, ``n x d``: shape ``(n,)``.

        Much faster than :meth:`joint_at` for many points.
        """
        return self.mean_of(self.inputs(points))

    def mean_of(self, inputs: Tensor) -> FloatArray:
        """As :meth:`mean_at`, of :meth:`inputs`."""
        with isolated(), torch.no_grad():
            kernel = self.model.covar_module.forward(inputs, self.model.train_inputs[0])
            speed: Tensor = self.model.mean_module(inputs) + kernel @ self._mean_weights
        return self._center - self._scale * speed.numpy()

    @property
    def knows_physics(self) -> bool:
        """Whether the cost model is among the experts; it is the first then."""
        return bool(self.experts) and self.experts[0].name == COST_MODEL

    def beyond_physics_at(self, points: FloatArray) -> FloatArray:
        """As :meth:`mean_at`, less what the cost model, the first expert, says."""
        inputs = self.inputs(points)
        said = -self._scale * inputs[:, -len(self.experts)].numpy()
        return self.mean_of(inputs) - said

    @cached_property
    def _mean_weights(self) -> Tensor:
        """What each observation adds to the mean per unit of covariance, shape ``(n,)``."""
        training = self.model.train_inputs[0]
        kernel = self.model.covar_module.forward(training, training)
        factor = psd_safe_cholesky(kernel + self.model.likelihood.noise.diag())
        unexplained = self.model.train_targets - self.model.mean_module(training)
        return torch.cholesky_solve(unexplained.unsqueeze(-1), factor).squeeze(-1)

    def predict(self, strategies: Sequence[Mapping[str, Value]]) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation of the latent log step time (natural, of seconds).

        Latent: of the strategy itself, without the noise of a further measurement.

        Returns:
            Two arrays of shape ``(n,)``.
        """
        mean, covariance = self.joint(strategies)
        return mean, np.sqrt(np.diagonal(covariance).clip(min=0.0))

    def joint(self, strategies: Sequence[Mapping[str, Value]]) -> tuple[FloatArray, FloatArray]:
        """Mean, shape ``(n,)``, and covariance, ``n x n``, of the latent log step times."""
        return self.joint_at(encode_all(self.space, strategies))

    def joint_at(self, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        """As :meth:`joint`, for points, shape ``n x d``."""
        if len(points) == 0:
            return np.empty(0), np.empty((0, 0))
        with isolated(), torch.no_grad():
            posterior = cast(GPyTorchPosterior, self.model.posterior(self.inputs(points)))
            latent = posterior.distribution
            speed, covariance = latent.mean.numpy(), latent.covariance_matrix.numpy()
        return self._center - self._scale * speed, self._scale**2 * covariance

    def sample_at(self, points: FloatArray, count: int, seed: int) -> FloatArray:
        """Joint samples, shape ``count x n``, of the latent log step times at points, ``n x d``."""
        mean, covariance = self.joint_at(points)
        normal = np.random.default_rng(seed).standard_normal((count, len(points)))
        if len(points) == 0:
            return normal
        with isolated():
            unit = torch.from_numpy(covariance / self._scale**2)
            root = psd_safe_cholesky(unit, jitter=1e-7, max_tries=7)
            deviation: FloatArray = (torch.from_numpy(normal) @ root.T).numpy()
        return mean + self._scale * deviation


def fit(problem: Problem, observations: Sequence[Observation]) -> Surrogate:
    """Fit the model to all observations of one problem.

    Proposing, deciding whether to go on and choosing candidates all ask for the same fit, so the
    last ones are remembered: a surrogate never changes once it is fitted.

    It never fails on odd data: failed trials say nothing of times (:mod:`feasibility` learns from
    them), and where the hyperparameters cannot be optimized the most likely ones of the prior are
    used. Without any observation the answer is the prior around one second.

    Raises:
        SpaceError: An observed strategy does not lie in the problem's space.
    """
    return _fit(problem, tuple(seen for seen in observations if seen.measured))


@lru_cache(maxsize=16)
def _fit(problem: Problem, observations: tuple[Observation, ...]) -> Surrogate:
    space = problem.space
    seen = observations or (Observation(space.default, 1.0, 1.0),)
    features = Features.of(space)
    points = encode_all(space, [one.strategy for one in seen])
    cost = cost_expert(space, problem.task, observations)
    known = () if cost is None else (cost,)
    sources = _source_experts(problem, cost, observations)
    surrogate = _fitted(features, (*known, *sources), points, seen)
    if sources:
        gains = loo_gains(surrogate.model, surrogate.experts)[len(known) :]
        kept = tuple(
            source
            for source, gain in zip(sources, gains, strict=True)
            if not misleads(gain, len(observations))
        )
        if len(kept) < len(sources):
            surrogate = _fitted(features, (*known, *kept), points, seen)
    return surrogate


def _fitted(
    features: Features, experts: tuple[Expert, ...], points: FloatArray,
    seen: tuple[Observation, ...],
) -> Surrogate:  # fmt: skip
    weights = np.array([expert.weight for expert in experts])
    spread = _SPREAD if not experts else _UNEXPLAINED_SPREAD
    targets = Targets.of(seen, opinions(experts, points) @ weights, spread)
    with isolated():
        inputs = _inputs(features, experts, points, targets.scale)
        model = _build(features, experts, inputs, targets)
        _optimize(model)
    return Surrogate(model, features, experts, targets)


def _source_experts(
    problem: Problem, cost: Expert | None, observations: tuple[Observation, ...]
) -> tuple[Expert, ...]:
    """The related tasks."""
    space, sources = problem.space, problem.sources
    total = max(sum(source.similarity for source in sources), 1.0)
    found = []
    for source in sources:
        surrogate = fit(Problem(source.space, source.task), source.observations)
        taught = surrogate.mean_at
        if cost is not None and surrogate.knows_physics:
            taught = surrogate.beyond_physics_at
        weight = source.similarity / total
        found.append(source_expert(space, source, taught, weight, _SOURCE_DEVIATION))
    return tuple(found)


def _inputs(
    features: Features, experts: Sequence[Expert], points: FloatArray, scale: float
) -> Tensor:
    """Knobs and, in the model's unit of speed, predictions: shape ``n x (p + c + e)``."""
    said = torch.from_numpy(-opinions(experts, points) / scale)
    return torch.cat([features(points), said], dim=1)


def _build(
    features: Features, experts: Sequence[Expert], inputs: Tensor, targets: Targets
) -> SingleTaskGP:
    """The model with the most likely hyperparameters of the prior."""
    speed = torch.from_numpy(-(targets.log_step - targets.center) / targets.scale)
    known = torch.from_numpy(targets.variance / targets.scale**2)
    relaunch = max((_RELAUNCH_NOISE / targets.scale) ** 2, 2 * _NOISE_FLOOR)
    # The mode of a log-normal density is exp(location - deviation^2).
    location = math.log(relaunch) + _RELAUNCH_DEVIATION**2
    likelihood = FixedNoiseGaussianLikelihood(
        noise=known.clamp_min(_NOISE_FLOOR),
        learn_additional_noise=True,
        noise_prior=LogNormalPrior(location, _RELAUNCH_DEVIATION),
        noise_constraint=GreaterThan(_NOISE_FLOOR, initial_value=relaunch),
    )
    weights, deviations = (
        torch.tensor(numbers, dtype=torch.float64)
        for numbers in ([e.weight for e in experts], [e.deviation for e in experts])
    )
    model = SingleTaskGP(
        inputs,
        speed.unsqueeze(-1),
        likelihood=likelihood,
        covar_module=MixedKernel(len(features.numeric), features.categorical_count, deviations),
        mean_module=ExpertMean(weights),
        outcome_transform=None,
    )
    return model.to(inputs)


def _optimize(model: SingleTaskGP) -> None:
    """Maximize the posterior density of the hyperparameters, in place.

    Tried twice, the second time with more jitter; then the prior's most likely values stay.
    """
    start = {name: value.clone() for name, value in model.state_dict().items()}
    objective = ExactMarginalLogLikelihood(model.likelihood, model)
    for jitter in _JITTERS:
        objective.train()
        try:
            with cholesky_jitter(double_value=jitter):
                fit_gpytorch_mll_scipy(objective, options={"maxiter": _FIT_ITERATIONS})
            if all(bool(value.isfinite().all()) for value in model.parameters()):
                break
        except (RuntimeError, ValueError, NotPSDError, BotorchError):
            pass
        model.load_state_dict(start)
    objective.eval()
