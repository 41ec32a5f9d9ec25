"""The posterior of a related task: mean and full covariance of its function, given its trials.

The function of source m is taken relative to the default x0 of the target's space,
f_m(x) - f_m(x0), because levels of step times do not transfer. With k_m its prior covariance, K_m
the covariance of its noisy trials and L_m L_m' = K_m (Rasmussen and Williams 2006, algorithm 2.1)::

    mean(x)   = (k_m(x, X) - k_m(x0, X)) K_m^-1 r
    S(x, x')  = k_m(x, x') - k_m(x, x0) - k_m(x0, x') + k_m(x0, x0) - a(x)' a(x')
    a(x)      = L_m^-1 (k_m(X, x) - k_m(X, x0))

Far from the source's trials a(x) is 0 and S that of the prior: there the source knows nothing, and
the target learns that from S (ScaML-GP [Tighineanu2024]_).

``n``: number of points; ``d``: dimension of the target's space; ``n_m``: trials of the source;
``w``: inputs of its model.

.. [Tighineanu2024] P. Tighineanu et al., "Scalable Meta-Learning with Gaussian Processes",
   AISTATS 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.points import FloatArray
from hvd_autosync.learner.projection import project_onto_space
from hvd_autosync.search_space import SearchSpace

if TYPE_CHECKING:
    from hvd_autosync.learner.multi_task_gp import MultiTaskGP

#: From the inputs of a source's model, ``... x n x w`` and ``... x m x w``, to ``... x n x m``.
Covariance = Callable[[Tensor, Tensor], Tensor]


class SourcePosterior:
    """The function of a related task, in logarithms of the step time over that of the default.

    Args:
        covariance: Prior covariance of the function, in squared logarithms of seconds.
        root: Cholesky factor of the covariance of the noisy trials, ``n_m x n_m``.
        weights: Weights of the trials in the posterior mean, ``(n_m,)``.
        trials: Inputs of the trials, ``n_m x w``.
        inputs: From points of the target's space, ``n x d``, to inputs of the source's model.
        default: The point of the target's default, ``1 x d``.
        prior_mean: Prior mean of the function, from inputs to ``(n,)``; ``None``: 0.
    """

    def __init__(
        self,
        covariance: Covariance,
        root: Tensor,
        weights: Tensor,
        trials: Tensor,
        inputs: Callable[[FloatArray], Tensor],
        default: FloatArray,
        prior_mean: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._covariance = covariance
        self._root, self._weights, self._trials = root, weights, trials
        self._find_inputs, self._prior_mean = inputs, prior_mean
        self._last: tuple[bytes, Tensor] | None = None
        with isolated(), torch.no_grad():
            self._default = inputs(default)
            self._level = covariance(self._default, self._default)
            self._shared = covariance(self._default, trials)

    @property
    def width(self) -> int:
        """Number of columns of :meth:`columns`."""
        return 1 + len(self._trials) + self._trials.shape[1]

    def mean(self, points: FloatArray) -> FloatArray:
        """Return the posterior mean at points of the target's space, ``n x d``: ``(n,)``."""
        with isolated(), torch.no_grad():
            inputs = self._inputs(points)
            mean = (self._covariance(inputs, self._trials) - self._shared) @ self._weights
            if self._prior_mean is not None:
                mean = mean + self._prior_mean(inputs) - self._prior_mean(self._default)
        found: FloatArray = mean.numpy()
        return found

    def _inputs(self, points: FloatArray) -> Tensor:
        """Return the inputs of its model; mean and columns ask for the same points in turn."""
        key = points.tobytes()
        last = self._last  # another thread may replace it
        if last is None or last[0] != key:
            last = self._last = key, self._find_inputs(points)
        return last[1]

    def columns(self, points: FloatArray) -> Tensor:
        """Return what :meth:`covariance` needs of points, ``n x d``: ``n x width``.

        The columns are k_m(x, x0), a(x) and the inputs of the source's model.
        """
        with isolated(), torch.no_grad():
            inputs = self._inputs(points)
            shared = (self._covariance(inputs, self._trials) - self._shared).T
            explained = torch.linalg.solve_triangular(self._root, shared, upper=False).T
            return torch.cat([self._covariance(inputs, self._default), explained, inputs], dim=1)

    def covariance(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the posterior covariance S of two sets of points.

        Args:
            one: Columns of points, ``batch_shape x n x width``.
            other: Columns of points, ``batch_shape x m x width``.

        Returns:
            ``batch_shape x n x m``, squared logarithms.
        """
        count = len(self._trials)
        with torch.no_grad():
            to_default = one[..., :1] + other[..., :1].transpose(-1, -2)
            explained = one[..., 1 : 1 + count] @ other[..., 1 : 1 + count].transpose(-1, -2)
            prior = self._covariance(one[..., 1 + count :], other[..., 1 + count :])
            return prior - to_default + self._level - explained


def source_posterior(
    model: MultiTaskGP, space: SearchSpace, target: SearchSpace, *, own: bool
) -> SourcePosterior:
    """Return the posterior of a fitted source at points of another space.

    Args:
        model: The fitted model of the source, which has no sources itself.
        space: The source's space.
        target: The target's space, whose points are projected onto the source's.
        own: Only the source's own function g, without its cost model: the target has its own.
    """
    transform, kernel = model.input_transform, model.covar_module
    center, scale = model.outcome_transform.center, model.outcome_transform.scale

    def inputs(points: FloatArray) -> Tensor:
        projected = project_onto_space(target, points, space)
        found: Tensor = transform.features(projected) if own else transform.at(projected)
        return found

    def covariance(one: Tensor, other: Tensor) -> Tensor:
        found: Tensor = (kernel.own if own else kernel).forward(one, other)
        return scale**2 * found

    def prior_mean(seen: Tensor) -> Tensor:
        found: Tensor = center + scale * model.mean_module(seen)
        return found

    with isolated(), torch.no_grad():
        root, weights = model.factorization
        trials = model.train_inputs[0].detach()
        if own:
            trials = trials[:, : kernel.knob_count]
    default = target.encode(target.default)[None]
    return SourcePosterior(
        covariance,
        scale * root.detach(),
        weights.detach() / scale,
        trials,
        inputs,
        default,
        None if own else prior_mean,
    )
