"""Predictions of a fitted model.

``n``: number of strategies; ``d``: dimension of the space. The inputs of the model are ``p``
numeric and ``c`` categorical ones and ``e`` basis functions of the prior functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import cast

import numpy as np
import torch
from botorch.models import SingleTaskGP
from botorch.posteriors.gpytorch import GPyTorchPosterior
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from hvd_autosync.learner.features import Features
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.outcome_transform import OutcomeTransform
from hvd_autosync.learner.points import FloatArray, encode_all
from hvd_autosync.learner.prior_functions import COST_MODEL, PriorFunction, design_matrix
from hvd_autosync.search_space import Value

#: Half the width of a 90 % interval of a normal distribution, in standard deviations.
HALF_WIDTH_90 = 1.645


class Surrogate:
    """A fitted model of the log step time over one space; :func:`hvd_autosync.learner.gp.fit`.

    Attributes:
        model: The BoTorch model; it takes :meth:`inputs` and predicts standardized speed.
        space: The space.
        priors: The prior functions that are its prior mean.
        dropped: Name of each prior function that source selection removed -> rise of the
            leave-one-out score at its removal, in the order of removal.
    """

    def __init__(
        self,
        model: SingleTaskGP,
        features: Features,
        priors: tuple[PriorFunction, ...],
        targets: OutcomeTransform,
        dropped: Mapping[str, float],
    ) -> None:
        self.model = model
        self.space = features.space
        self.priors = priors
        self.dropped = dropped
        self._features = features
        self._center = targets.center
        self._scale = targets.scale

    def inputs(self, points: FloatArray) -> Tensor:
        """Return the model's inputs at points, ``n x d``; shape ``n x (p + c + e)``."""
        basis = design_matrix(self.priors, points)
        return model_inputs(self._features, basis, points, self._scale)

    def mean_at(self, points: FloatArray) -> FloatArray:
        """Return the mean of the latent log step time at points, ``n x d``; shape ``(n,)``.

        Much faster than :meth:`joint_at` for many points.
        """
        return self.mean_of(self.inputs(points))

    def mean_of(self, inputs: Tensor) -> FloatArray:
        """Like :meth:`mean_at`, for the result of :meth:`inputs`."""
        with isolated(), torch.no_grad():
            kernel = self.model.covar_module.forward(inputs, self.model.train_inputs[0])
            speed: Tensor = self.model.mean_module(inputs) + kernel @ self._mean_weights
        return self._center - self._scale * speed.numpy()

    @property
    def has_cost_model(self) -> bool:
        """Whether the cost model is among the prior functions; if so, it is the first."""
        return bool(self.priors) and self.priors[0].name == COST_MODEL

    def residual_mean_at(self, points: FloatArray) -> FloatArray:
        """Like :meth:`mean_at`, minus the prediction of the cost model, the first prior."""
        inputs = self.inputs(points)
        first = len(self._features.numeric) + self._features.categorical_count
        weights = self.priors[0].map_weights
        # Basis functions enter the model negated and divided by the scale (model_inputs).
        cost = inputs[:, first : first + len(weights)].numpy() @ np.array(weights)
        residual_mean: FloatArray = self.mean_of(inputs) + self._scale * cost
        return residual_mean

    @cached_property
    def _mean_weights(self) -> Tensor:
        """Weights of the training covariances in the posterior mean, shape ``(n,)``."""
        training = self.model.train_inputs[0]
        kernel = self.model.covar_module.forward(training, training)
        factor = psd_safe_cholesky(kernel + self.model.likelihood.noise.diag())
        residual = self.model.train_targets - self.model.mean_module(training)
        return torch.cholesky_solve(residual.unsqueeze(-1), factor).squeeze(-1)

    def predict(self, strategies: Sequence[Mapping[str, Value]]) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation of the latent log step time (natural, of seconds).

        Latent: without the noise of a further measurement.

        Returns:
            Two arrays of shape ``(n,)``.
        """
        mean, covariance = self.joint(strategies)
        return mean, np.sqrt(np.diagonal(covariance).clip(min=0.0))

    def joint(self, strategies: Sequence[Mapping[str, Value]]) -> tuple[FloatArray, FloatArray]:
        """Mean, shape ``(n,)``, and covariance, ``n x n``, of the latent log step times."""
        return self.joint_at(encode_all(self.space, strategies))

    def joint_at(self, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Like :meth:`joint`, for points, shape ``n x d``."""
        return self.joint_of(self.inputs(points))

    def joint_of(self, inputs: Tensor) -> tuple[FloatArray, FloatArray]:
        """Like :meth:`joint`, for the result of :meth:`inputs`."""
        if len(inputs) == 0:
            return np.empty(0), np.empty((0, 0))
        with isolated(), torch.no_grad():
            posterior = cast(GPyTorchPosterior, self.model.posterior(inputs))
            latent = posterior.distribution
            speed, covariance = latent.mean.numpy(), latent.covariance_matrix.numpy()
        return self._center - self._scale * speed, self._scale**2 * covariance


def model_inputs(features: Features, basis: FloatArray, points: FloatArray, scale: float) -> Tensor:
    """Return the inputs of the model: knobs and basis functions, shape ``n x (p + c + e)``.

    The model predicts speed in units of ``scale``, so basis functions are negated and divided.

    Args:
        features: The features of the space.
        basis: Basis functions at the points, in logarithms of step times, ``n x e``.
        points: Discretized points, ``n x d``.
        scale: The model's unit.
    """
    return torch.cat([features(points), torch.from_numpy(-basis / scale)], dim=1)
