"""Points: strategies as rows of numbers, vectorized over many strategies.

``n``: number of points; ``d``: dimension of the space (``space.dimension``). A point is
*discretized* if it is the image of a strategy, ``space.encode(space.decode(point))``; equal
strategies then have equal rows, bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from hvd_autosync.search_space import CategoricalKnob, IntegerKnob, Knob, SearchSpace, Value
from hvd_autosync.search_space.conditions import active

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

#: Spaces of at most this many strategies are enumerated.
ENUMERABLE = 1024


def can_vary(knob: Knob) -> bool:
    """Return whether the knob has more than one value."""
    if isinstance(knob, CategoricalKnob):
        return len(knob.choices) > 1
    return knob.low < knob.high


def encode_all(space: SearchSpace, strategies: Iterable[Mapping[str, Value]]) -> FloatArray:
    """Return the discretized points of strategies, ``n x d``; absent knobs have their default.

    Raises:
        SpaceError: A strategy does not lie in the space.
    """
    rows = [space.encode(space.complete(strategy)) for strategy in strategies]
    return np.array(rows, dtype=np.float64).reshape(len(rows), space.dimension)


def discretize(space: SearchSpace, points: FloatArray) -> FloatArray:
    """Move ``points``, shape ``n x d``, onto strategies: decode and encode each row.

    The loop is over knobs instead of rows, which is much faster.
    """
    discretized = np.empty_like(points)
    for index, knob in enumerate(space.knobs):
        unique, inverse = np.unique(points[:, index], return_inverse=True)
        positions = [knob.to_unit(knob.from_unit(float(position))) for position in unique]
        discretized[:, index] = np.array(positions)[inverse]
    defaults = np.array([knob.to_unit(knob.default) for knob in space.knobs])
    return np.where(active(space, discretized), discretized, defaults)


def spread(space: SearchSpace, uniform: FloatArray) -> FloatArray:
    """Return discretized points from uniform numbers, ``n x d``; choices are equally likely."""
    points = uniform.copy()
    for index, knob in enumerate(space.knobs):
        if isinstance(knob, CategoricalKnob):
            count = len(knob.choices)
            points[:, index] = np.floor(uniform[:, index] * count) / max(count - 1, 1)
    return discretize(space, points)


def sobol_points(space: SearchSpace, count: int, seed: int) -> FloatArray:
    """Return the first points of a scrambled Sobol sequence, discretized, ``count x d``."""
    if space.dimension == 0:
        return np.empty((count, 0))
    import torch  # takes seconds, and most commands draw no points
    from torch.quasirandom import SobolEngine

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # that of the engine's first point
    try:
        engine = SobolEngine(space.dimension, scramble=True, seed=seed)
        return spread(space, engine.draw(count, dtype=torch.float64).numpy())
    finally:
        torch.set_default_dtype(before)


def every_point(space: SearchSpace) -> FloatArray | None:
    """Return all strategies as points, ``n x d``; ``None`` if there are more than `ENUMERABLE`."""
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
        odd = knob.default not in (knob.low, knob.high) and knob.default % knob.multiple > 0
        return (knob.high - knob.low) // knob.multiple + 2 + odd
    return math.inf


def _positions(knob: Knob) -> list[float]:
    if isinstance(knob, CategoricalKnob):
        return [knob.to_unit(choice) for choice in knob.choices]
    if not isinstance(knob, IntegerKnob) or not can_vary(knob):
        return [knob.to_unit(knob.low)]
    low, high = int(knob.low), int(knob.high)
    inner = range(-(-low // knob.multiple) * knob.multiple, high + 1, knob.multiple)
    return [knob.to_unit(value) for value in sorted({low, *inner, high, int(knob.default)})]


def keys(points: FloatArray) -> list[bytes]:
    """Return one key per discretized point; keys are equal if and only if strategies are."""
    return [row.tobytes() for row in np.ascontiguousarray(points)]


def distinct(points: FloatArray, excluded: Collection[bytes] = ()) -> FloatArray:
    """Return ``points`` in order, without repetitions and without those of excluded keys."""
    seen = set(excluded)
    kept = []
    for index, key in enumerate(keys(points)):
        if key not in seen:
            seen.add(key)
            kept.append(index)
    return points[kept]
