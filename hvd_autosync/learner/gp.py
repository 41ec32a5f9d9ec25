"""The surrogate: a Gaussian process of the logarithm of the step time over one space.

``n``: number of observations or strategies; ``d``: dimension of the space. The GP sees *speed*,
minus the standardized logarithm of the step time, because BoTorch maximizes. Its noise is what
each trial's own steps say (heteroscedastic, known) plus what launches of one strategy differ by
(homoscedastic, learned).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from botorch.exceptions.errors import BotorchError
from botorch.models import SingleTaskGP
from botorch.optim.fit import fit_gpytorch_mll_scipy
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior, NormalPrior
from gpytorch.settings import cholesky_jitter
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from hvd_autosync.learner.features import Features
from hvd_autosync.learner.kernel import MixedKernel
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import FloatArray, encode_all
from hvd_autosync.learner.targets import Targets
from hvd_autosync.search_space import SearchSpace, Value

#: Most iterations of the fit; more change the likelihood little and cost most of the time.
_FIT_ITERATIONS = 75
#: Relative difference between launches of one strategy: most likely value, and the deviation of
#: the logarithm of its variance (0.4 % to 9 % lie within two of them). On machines that are
#: shared, 5 % and more were measured (benchmarks/README.md).
_RELAUNCH_NOISE, _RELAUNCH_DEVIATION = 0.02, 1.5
#: Smallest noise variances in the model's unit, for the factorization's sake.
_NOISE_FLOOR = 1e-6
_JITTERS = (1e-8, 1e-4)


class Surrogate:
    """A fitted model of the log step time over one space; see :func:`fit`.

    Attributes:
        model: The BoTorch model; it takes :attr:`features` and predicts standardized speed.
        features: From points, ``n x d``, to the model's inputs.
    """

    def __init__(self, model: SingleTaskGP, features: Features, center: float, scale: float):
        self.model = model
        self.features = features
        self._center = center
        self._scale = scale

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
        return self.joint_at(encode_all(self.features.space, strategies))

    def joint_at(self, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        """As :meth:`joint`, for points, shape ``n x d``."""
        if len(points) == 0:
            return np.empty(0), np.empty((0, 0))
        with isolated(), torch.no_grad():
            posterior = cast(GPyTorchPosterior, self.model.posterior(self.features(points)))
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


def fit(space: SearchSpace, observations: Sequence[Observation]) -> Surrogate:
    """Fit the model to all observations of one space.

    Proposing, deciding whether to go on and choosing candidates all ask for the same fit, so the
    last ones are remembered: a surrogate never changes once it is fitted.

    It never fails on odd data: failed trials are imputed, and where the hyperparameters cannot be
    optimized the most likely ones of the prior are used. Without any observation the answer is
    the prior around one second.

    Raises:
        SpaceError: An observed strategy does not lie in ``space``.
    """
    return _fit(space, tuple(observations))


@lru_cache(maxsize=2)
def _fit(space: SearchSpace, observations: tuple[Observation, ...]) -> Surrogate:
    seen = observations or (Observation(space.default, 1.0, 1.0),)
    features = Features.of(space)
    targets = Targets.of(seen)
    with isolated():
        inputs = features(encode_all(space, [one.strategy for one in seen]))
        model = _build(features, inputs, targets)
        _optimize(model)
    return Surrogate(model, features, targets.center, targets.scale)


def _build(features: Features, inputs: Tensor, targets: Targets) -> SingleTaskGP:
    """The model with the most likely hyperparameters of the prior; ``inputs``: ``n x (p + c)``."""
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
    model = SingleTaskGP(
        inputs,
        speed.unsqueeze(-1),
        likelihood=likelihood,
        covar_module=MixedKernel(len(features.numeric), features.categorical_count),
        mean_module=ConstantMean(constant_prior=NormalPrior(0.0, 1.0)),
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
