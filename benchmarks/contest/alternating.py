"""BoTorch's optimizer of mixed spaces on the acquisition function of one of our surrogates.

``b``: batch; ``n``: number of points; ``d``: dimension of the space; ``k``: inputs of the model.
BoTorch sees ``b x 1 x d`` coordinates: positions of numbers, and the number of each choice. The
model's inputs follow from a point by numpy, cost model included, so their derivatives with respect
to the numbers are central differences, which are exact where an input is a position. From the
inputs on derivatives are torch's.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.models.gpytorch import GPyTorchModel
from botorch.optim.optimize_mixed import optimize_acqf_mixed_alternating
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from hvd_autosync.learner.acquisition import LogExpectedUtility
from hvd_autosync.learner.points import FloatArray, can_vary, discretize
from hvd_autosync.learner.surrogate import Surrogate
from hvd_autosync.search_space import CategoricalKnob, IntegerKnob, Knob, SearchSpace
from hvd_autosync.search_space.conditions import active

#: A number of at most so many values is a discrete dimension, as BoTorch would have it.
_MOST_VALUES = 20
#: Where values of a number are looked for, and how far apart differences are taken.
_GRID = np.linspace(0.0, 1.0, 1001)
_STEP = 1e-3


class Coordinates:
    """BoTorch's view of a space.

    Attributes:
        bounds: ``2 x d``.
        categories: Dimension of each choice that can vary -> the numbers of its choices.
        discrete: Dimension of each number of few values -> their positions.
        fixed: Dimension of each knob that cannot vary -> its coordinate.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        knobs = list(enumerate(space.knobs))
        choices = {i: knob for i, knob in knobs if isinstance(knob, CategoricalKnob)}
        self._scale = np.ones(space.dimension)
        for index, knob in choices.items():
            self._scale[index] = max(len(knob.choices) - 1, 1)
        self._chosen = list(choices)
        self._numbers = [i for i, knob in knobs if i not in choices and can_vary(knob)]
        self.bounds = torch.from_numpy(np.stack([np.zeros(space.dimension), self._scale]))
        self.categories = {
            i: list(range(len(knob.choices))) for i, knob in choices.items() if can_vary(knob)
        }
        self.discrete = {
            i: values
            for i in self._numbers
            if len(values := _positions(space.knobs[i])) <= _MOST_VALUES
        }
        self.fixed = {i: 0.0 for i, knob in knobs if not can_vary(knob)}

    def of(self, points: FloatArray) -> Tensor:
        """Return the coordinates of points, ``n x d``."""
        return torch.from_numpy(points * self._scale)

    def points(self, coordinates: FloatArray) -> FloatArray:
        """Return points, ``n x d``: choices are rounded, numbers stay where they are.

        Knobs that are switched off have their defaults, as in discretized points.
        """
        points = coordinates / self._scale
        strategies = discretize(self._space, points)
        points[:, self._chosen] = strategies[:, self._chosen]
        return np.where(active(self._space, strategies), points, strategies)

    def numbers(self) -> list[int]:
        """Dimensions of the numbers that can vary."""
        return self._numbers


def _positions(knob: Knob) -> list[float]:
    """Return the positions of a number's values in order; those of a real number are many."""
    if not isinstance(knob, IntegerKnob):
        return [float(position) for position in _GRID]
    return sorted({knob.to_unit(knob.from_unit(float(position))) for position in _GRID})


class OnInputs(GPyTorchModel):
    """A surrogate's model of log step times as a function of its inputs, with derivatives."""

    def __init__(self, surrogate: Surrogate) -> None:
        super().__init__()
        self._surrogate = surrogate
        self._unit = surrogate.model.outcome_transform

    @property
    def num_outputs(self) -> int:
        return 1

    @property
    def batch_shape(self) -> torch.Size:
        return torch.Size()

    def posterior(self, X: Tensor, *_: object, **__: object) -> GPyTorchPosterior:
        """The joint posterior at inputs, ``b x q x k``."""
        model = self._surrogate.model
        root, weights = model.factorization
        shared = model.covar_module.forward(X, model.train_inputs[0])
        explained = torch.linalg.solve_triangular(root, shared.mT, upper=False)
        mean = model.mean_module(X) + shared @ weights
        covariance = model.covar_module.forward(X, X) - explained.mT @ explained
        center, scale = self._unit.center, self._unit.scale
        return GPyTorchPosterior(MultivariateNormal(center + scale * mean, scale**2 * covariance))


class OverCoordinates(AcquisitionFunction):
    """The acquisition function of a surrogate as one of coordinates.

    Args:
        surrogate: The fitted model.
        baseline: Points to improve on, ``n x d``; BoTorch starts near some of them.
        seed: Seed of the samples.

    Attributes:
        differences_s: Processor seconds of differences so far.
    """

    def __init__(self, surrogate: Surrogate, baseline: FloatArray, seed: int) -> None:
        model = OnInputs(surrogate)
        super().__init__(model)
        self.acquisition = LogExpectedUtility(model, surrogate.inputs(baseline), seed=seed)
        self.surrogate = surrogate
        self.coordinates = Coordinates(surrogate.space)
        self.X_baseline = self.coordinates.of(baseline)
        self.set_X_pending(None)
        self.differences_s = 0.0

    def forward(self, X: Tensor) -> Tensor:
        values: Tensor = self.acquisition(_Inputs.apply(X, self))  # type: ignore[no-untyped-call]
        return values

    def inputs(self, coordinates: FloatArray) -> Tensor:
        """The model's inputs, ``n x k``."""
        return self.surrogate.inputs(self.coordinates.points(coordinates))


class _Inputs(torch.autograd.Function):
    """The model's inputs, ``... x k``, at coordinates, ``... x d``."""

    @staticmethod
    def forward(ctx: Any, coordinates: Tensor, over: OverCoordinates) -> Tensor:
        ctx.over = over
        ctx.save_for_backward(coordinates)
        shape = coordinates.shape
        inputs = over.inputs(coordinates.reshape(-1, shape[-1]).numpy())
        return inputs.reshape(*shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        began = time.process_time()
        (saved,) = ctx.saved_tensors
        numbers, place = ctx.over.coordinates.numbers(), saved.reshape(-1, saved.shape[-1]).numpy()
        outer = gradient.reshape(len(place), -1).numpy()
        ends = np.tile(place, (2, len(numbers), 1, 1))  # 2 x numbers x n x d
        for row, index in enumerate(numbers):
            ends[0, row, :, index] = np.minimum(place[:, index] + _STEP, 1.0)
            ends[1, row, :, index] = np.maximum(place[:, index] - _STEP, 0.0)
        inputs = ctx.over.inputs(ends.reshape(-1, place.shape[1])).numpy()
        high, low = inputs.reshape(2, len(numbers), len(place), -1)
        found = np.zeros_like(place)
        for row, index in enumerate(numbers):
            apart = ends[0, row, :, index] - ends[1, row, :, index]
            found[:, index] = ((high[row] - low[row]) * outer).sum(axis=1) / apart
        ctx.over.differences_s += time.process_time() - began
        return torch.from_numpy(found).reshape(saved.shape), None


def alternating(over: OverCoordinates, restarts: int, raw_samples: int) -> FloatArray:
    """Return the discretized point that ``optimize_acqf_mixed_alternating`` finds, ``(d,)``."""
    coordinates = over.coordinates
    found, _ = optimize_acqf_mixed_alternating(
        over,
        bounds=coordinates.bounds,
        discrete_dims=coordinates.discrete,
        cat_dims=coordinates.categories,
        fixed_features=coordinates.fixed,
        q=1,
        num_restarts=restarts,
        raw_samples=raw_samples,
    )
    strategies = discretize(over.surrogate.space, coordinates.points(found.detach().numpy()))
    point: FloatArray = strategies[0]
    return point
