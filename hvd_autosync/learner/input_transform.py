"""The input transform: from points of the space to the inputs of the multi-task GP.

``n``: number of points; ``d``: dimension of the space. The inputs are those of the knobs
(:mod:`hvd_autosync.learner.features`), the basis functions of all prior functions, and the columns
of the related tasks (:mod:`hvd_autosync.learner.source_posterior`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from botorch.models.transforms.input import InputTransform
from torch import Tensor
from torch.nn import Module

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.learner.features import Features
from hvd_autosync.learner.points import FloatArray
from hvd_autosync.learner.prior_functions import PriorFunction, design_matrix


class StrategyInputs(InputTransform, Module):
    """The transform of this module.

    It has no gradient: points are those of strategies.

    Args:
        features: The features of the space.
        priors: The prior functions.
    """

    def __init__(self, features: Features, priors: Sequence[PriorFunction]) -> None:
        super().__init__()
        self.features = features
        self.priors = tuple(priors)
        self.transform_on_train = self.transform_on_eval = self.transform_on_fantasize = True
        self._last: tuple[bytes, Tensor] | None = None

    def transform(self, X: Tensor) -> Tensor:
        """Return the model's inputs at points, ``batch_shape x n x d``.

        Raises:
            ConfigurationError: ``X`` requires a gradient.
        """
        if X.requires_grad:
            raise ConfigurationError(
                "the model has no gradient with respect to points: they are those of strategies",
                hint="Use optimize_acqf_discrete, or X.detach().",
            )
        points = X.reshape(X.shape[:-1].numel(), X.shape[-1]).numpy()
        key = points.tobytes()  # a fit asks for the same points at every step
        last = self._last  # another thread may replace it
        if last is None or last[0] != key:
            last = self._last = key, self.at(points)
        inputs = last[1]
        return inputs.reshape(*X.shape[:-1], inputs.shape[-1])

    def at(self, points: FloatArray) -> Tensor:
        """Return the model's inputs at points, ``n x d``."""
        basis = torch.from_numpy(design_matrix(self.priors, points))
        known = [each.source.columns(points) for each in self.priors if each.source is not None]
        return torch.cat([self.features(points), basis, *known], dim=1)

    def equals(self, other: InputTransform) -> bool:
        """Return whether ``other`` is this transform; BoTorch asks before it shares one."""
        return other is self
