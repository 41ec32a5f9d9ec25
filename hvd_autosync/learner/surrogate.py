"""Predictions of a fitted model for strategies.

``n``: number of strategies; ``d``: dimension of the space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hvd_autosync.learner.multi_task_gp import MultiTaskGP
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.points import FloatArray, encode_all
from hvd_autosync.learner.prior_functions import COST_MODEL, PriorFunction
from hvd_autosync.search_space import SearchSpace, Value

#: Half the width of a 90 % interval of a normal distribution, in standard deviations.
HALF_WIDTH_90 = 1.645


class Surrogate:
    """A fitted model of the log step time over one space; :func:`hvd_autosync.learner.gp.fit`.

    Attributes:
        model: The BoTorch model.
        dropped: Name of each prior function that source selection removed -> rise of the
            leave-one-out score at its removal, in the order of removal.
    """

    def __init__(self, model: MultiTaskGP, dropped: Mapping[str, float]) -> None:
        self.model = model
        self.dropped = dropped
        self._center = model.outcome_transform.center
        self._scale = model.outcome_transform.scale

    @property
    def space(self) -> SearchSpace:
        """The space."""
        return self.model.input_transform.features.space

    @property
    def priors(self) -> tuple[PriorFunction, ...]:
        """The prior functions of the model."""
        return self.model.input_transform.priors

    @property
    def has_cost_model(self) -> bool:
        """Whether the cost model is among the prior functions; if so, it is the first."""
        return bool(self.priors) and self.priors[0].name == COST_MODEL

    def inputs(self, points: FloatArray) -> Tensor:
        """Return the model's inputs at points, ``n x d``, for the methods that end in ``_of``."""
        with isolated(), torch.no_grad():
            found: Tensor = self.model.input_transform.at(points)
        return found

    def mean_at(self, points: FloatArray) -> FloatArray:
        """Return the mean of the latent log step time at points, ``n x d``; shape ``(n,)``.

        Much faster than :meth:`joint_at` for many points.
        """
        return self.mean_of(self.inputs(points))

    def mean_of(self, inputs: Tensor) -> FloatArray:
        """Like :meth:`mean_at`, for the result of :meth:`inputs`."""
        with isolated(), torch.no_grad():
            _, weights = self.model.factorization
            shared = self.model.covar_module.forward(inputs, self.model.train_inputs[0])
            mean: Tensor = self.model.mean_module(inputs) + shared @ weights
        return self._center + self._scale * mean.numpy()

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
        mean, rows, _ = self.joint_with(inputs, inputs[:0])
        return mean, rows

    def joint_with(
        self, anchors: Tensor, others: Tensor
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the joint posterior of each of many points with the same few, its anchors.

        Args:
            anchors: Result of :meth:`inputs` at ``k`` points.
            others: Result of :meth:`inputs` at ``m`` points.

        Returns:
            The means of all, anchors first, ``(k + m,)``; the covariances of the anchors with all,
            ``k x (k + m)``; the variances of all, ``(k + m,)``.
        """
        with isolated(), torch.no_grad():
            root, weights = self.model.factorization
            kernel, inputs = self.model.covar_module, torch.cat([anchors, others])
            shared = kernel.forward(inputs, self.model.train_inputs[0])
            explained = torch.linalg.solve_triangular(root, shared.T, upper=False)
            mean = self.model.mean_module(inputs) + shared @ weights
            rows = kernel.forward(anchors, inputs) - explained[:, : len(anchors)].T @ explained
            variance = kernel.forward(inputs, inputs, diag=True) - explained.square().sum(dim=0)
        squared = self._scale**2
        return (
            self._center + self._scale * mean.numpy(),
            squared * rows.numpy(),
            squared * variance.clamp_min(0.0).numpy(),
        )
