"""Strategies as rows of numbers: many at once, snapped, enumerated, told apart.

``n``: number of points; ``d``: dimension of the space (``space.dimension``). A point is *snapped*
when it is the image of a strategy, ``space.encode(space.decode(point))``; equal strategies are
then equal rows, bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch.quasirandom import SobolEngine

from hvd_autosync.search_space import CategoricalKnob, IntegerKnob, Knob, SearchSpace, Value

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

#: Spaces of at most this many strategies are searched completely.
ENUMERABLE = 1024


def can_vary(knob: Knob) -> bool:
    """Whether the knob has more than one value (a fixed knob is a dimension of no width)."""
    if isinstance(knob, CategoricalKnob):
        return len(knob.choices) > 1
    return knob.low < knob.high


def encode_all(space: SearchSpace, strategies: Iterable[Mapping[str, Value]]) -> FloatArray:
    """The snapped points of strategies, shape ``n x d``; absent knobs stand at their default.

    Raises:
        SpaceError: A strategy does not lie in the space.
    """
    rows = [space.encode(space.complete(strategy)) for strategy in strategies]
    return np.array(rows, dtype=np.float64).reshape(len(rows), space.dimension)


def active(space: SearchSpace, points: FloatArray) -> BoolArray:
    """Whether each knob's condition holds at each of the points, shape ``n x d``."""
    holds = np.ones(points.shape, dtype=np.bool_)
    held = dict(space.fixed)
    column = {knob.name: index for index, knob in enumerate(space.knobs)}
    for index, condition in enumerate(knob.condition for knob in space.knobs):
        if condition is None:
            continue
        if condition.knob not in column:
            holds[:, index] = condition.holds(held)
            continue
        parent = column[condition.knob]
        unique, inverse = np.unique(points[:, parent], return_inverse=True)
        values = [space.knobs[parent].from_unit(float(position)) for position in unique]
        switched_on = np.array(
            [condition.holds({condition.knob: value}) for value in values], dtype=np.bool_
        )
        holds[:, index] = holds[:, parent] & switched_on[inverse]
    return holds


def discretize(space: SearchSpace, points: FloatArray) -> FloatArray:
    """``points``, shape ``n x d``, moved onto strategies: each row decoded and encoded again.

    It goes knob by knob instead of row by row, which is much faster.
    """
    snapped = np.empty_like(points)
    for index, knob in enumerate(space.knobs):
        unique, inverse = np.unique(points[:, index], return_inverse=True)
        positions = [knob.to_unit(knob.from_unit(float(position))) for position in unique]
        snapped[:, index] = np.array(positions)[inverse]
    defaults = np.array([knob.to_unit(knob.default) for knob in space.knobs])
    return np.where(active(space, snapped), snapped, defaults)


def spread(space: SearchSpace, uniform: FloatArray) -> FloatArray:
    """Snapped points from uniform numbers, shape ``n x d``, each choice with an equal share."""
    points = uniform.copy()
    for index, knob in enumerate(space.knobs):
        if isinstance(knob, CategoricalKnob):
            count = len(knob.choices)
            points[:, index] = np.floor(uniform[:, index] * count) / max(count - 1, 1)
    return discretize(space, points)


def sobol_points(space: SearchSpace, count: int, seed: int) -> FloatArray:
    """The first ``count`` points of a scrambled Sobol sequence, snapped, shape ``count x d``."""
    if space.dimension == 0:
        return np.empty((count, 0))
    engine = SobolEngine(space.dimension, scramble=True, seed=seed)
    return spread(space, engine.draw(count, dtype=torch.float64).numpy())


def every_point(space: SearchSpace) -> FloatArray | None:
    """All strategies as points, shape ``n x d``; ``None`` when they are too many."""
    counts = [_count(knob) for knob in space.knobs]
    if math.prod(counts) > ENUMERABLE:
        return None
    grid = list(itertools.product(*(_positions(knob) for knob in space.knobs)))
    points = np.array(grid, dtype=np.float64).reshape(len(grid), space.dimension)
    return distinct(discretize(space, points))


def _count(knob: Knob) -> float:
    """Upper bound of the number of values of ``knob``."""
    if isinstance(knob, CategoricalKnob):
        return len(knob.choices)
    if not can_vary(knob):
        return 1
    if isinstance(knob, IntegerKnob):
        return (knob.high - knob.low) // knob.multiple + 2
    return math.inf


def _positions(knob: Knob) -> list[float]:
    if isinstance(knob, CategoricalKnob):
        return [knob.to_unit(choice) for choice in knob.choices]
    if not isinstance(knob, IntegerKnob) or not can_vary(knob):
        return [knob.to_unit(knob.low)]
    low, high = int(knob.low), int(knob.high)
    inner = range(-(-low // knob.multiple) * knob.multiple, high + 1, knob.multiple)
    return [knob.to_unit(value) for value in sorted({low, *inner, high})]


def keys(points: FloatArray) -> list[bytes]:
    """One key per snapped point: equal exactly for equal strategies."""
    return [row.tobytes() for row in np.ascontiguousarray(points)]


def distinct(points: FloatArray, excluded: Collection[bytes] = ()) -> FloatArray:
    """``points`` without repetitions and without those whose key is excluded, in order."""
    seen = set(excluded)
    kept = []
    for index, key in enumerate(keys(points)):
        if key not in seen:
            seen.add(key)
            kept.append(index)
    return points[kept]
