"""What a fitted model says of strategies.

``n``: number of strategies; ``d``: dimension of the space. Inputs of the model: ``p`` numeric and
``c`` categorical ones, and ``e`` numbers that experts say.
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
        experts: Whose predictions it starts from.
        dropped: Experts that are not among them, as they mislead, in the order in which they went
            -> by how much the leave-one-out score rose without each.
    """

    def __init__(
        self,
        model: SingleTaskGP,
        features: Features,
        experts: tuple[PriorFunction, ...],
        targets: OutcomeTransform,
        dropped: Mapping[str, float],
    ) -> None:
        self.model = model
        self.space = features.space
        self.experts = experts
        self.dropped = dropped
        self._features = features
        self._center = targets.center
        self._scale = targets.scale

    def inputs(self, points: FloatArray) -> Tensor:
        """The model's inputs at points, ``n x d``: shape ``n x (p + c + e)``."""
        said = design_matrix(self.experts, points)
        return model_inputs(self._features, said, points, self._scale)

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
    def has_cost_model(self) -> bool:
        """Whether the cost model is among the experts; it is the first then."""
        return bool(self.experts) and self.experts[0].name == COST_MODEL

    def residual_mean_at(self, points: FloatArray) -> FloatArray:
        """As :meth:`mean_at`, less what the cost model, the first expert, expects."""
        inputs = self.inputs(points)
        first = len(self._features.numeric) + self._features.categorical_count
        likely = self.experts[0].likely
        said = inputs[:, first : first + len(likely)].numpy() @ np.array(likely)
        beyond: FloatArray = self.mean_of(inputs) + self._scale * said
        return beyond

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
        return self.joint_of(self.inputs(points))

    def joint_of(self, inputs: Tensor) -> tuple[FloatArray, FloatArray]:
        """As :meth:`joint`, of :meth:`inputs`."""
        if len(inputs) == 0:
            return np.empty(0), np.empty((0, 0))
        with isolated(), torch.no_grad():
            posterior = cast(GPyTorchPosterior, self.model.posterior(inputs))
            latent = posterior.distribution
            speed, covariance = latent.mean.numpy(), latent.covariance_matrix.numpy()
        return self._center - self._scale * speed, self._scale**2 * covariance


def model_inputs(features: Features, said: FloatArray, points: FloatArray, scale: float) -> Tensor:
    """Knobs and, in the model's unit of speed, predictions: shape ``n x (p + c + e)``.

    Args:
        features: Of the space.
        said: What experts say of the points, logarithms of step times, ``n x e``.
        points: Snapped points, ``n x d``.
        scale: The unit.
    """
    return torch.cat([features(points), torch.from_numpy(-said / scale)], dim=1)
