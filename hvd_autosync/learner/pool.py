"""Candidate points: spread over the space, near good points, and one knob away from the best.

``n``: number of points; ``d``: dimension of the space. All points are discretized and distinct.
"""

from __future__ import annotations

import numpy as np

from hvd_autosync.learner.points import (
    FloatArray,
    can_vary,
    discretize,
    distinct,
    every_point,
    sobol_points,
)
from hvd_autosync.search_space import CategoricalKnob, IntegerKnob, Knob, SearchSpace

#: Candidates spread over the space, and candidates near the best points.
_SPREAD, _NEAR = 1024, 512
#: Standard deviations of a changed numeric knob, as shares of its range.
_SCALES = (0.3, 0.1, 0.03)


def candidate_pool(space: SearchSpace, best: FloatArray, seed: int) -> tuple[FloatArray, bool]:
    """Return the candidates for the next trial.

    Args:
        space: The space.
        best: Discretized points to search around, best first, shape ``k x d``.
        seed: Seed of the random choices.

    Returns:
        The points, shape ``n x d``, and whether they are all strategies of the space.
    """
    everything = every_point(space)
    if everything is not None:
        return everything, True
    rng = np.random.default_rng(seed)
    parts = [best, sobol_points(space, _SPREAD, int(rng.integers(2**31)))]
    if len(best):
        parts += [one_knob_away(space, best[:1], _SCALES), _perturbed(space, best, _NEAR, rng)]
    return distinct(np.concatenate(parts)), False


def one_knob_away(space: SearchSpace, points: FloatArray, steps: tuple[float, ...]) -> FloatArray:
    """Return each point with one knob changed: to each other choice, or up and down by each step.

    Args:
        space: The space.
        points: Discretized points, shape ``k x d``.
        steps: Step lengths as shares of a numeric knob's range.

    Returns:
        Points, shape ``n x d``. A given point is among them only if it is a neighbour of another.
    """
    moved = []
    for index, knob in enumerate(space.knobs):
        if not can_vary(knob):
            continue
        for target in _targets(knob, points[:, index], steps):
            changed = points.copy()
            changed[:, index] = target
            moved.append(changed[changed[:, index] != points[:, index]])
    if not moved:
        return points[:0]
    return distinct(discretize(space, np.concatenate(moved)))


def _targets(knob: Knob, column: FloatArray, steps: tuple[float, ...]) -> list[FloatArray]:
    """Return the neighbouring values of one knob for ``column``, ``(k,)``: arrays of that shape."""
    if isinstance(knob, CategoricalKnob):
        return [np.full(len(column), knob.to_unit(choice)) for choice in knob.choices]
    targets = [np.clip(column + sign * step, 0.0, 1.0) for step in steps for sign in (-1, 1)]
    if isinstance(knob, IntegerKnob):
        # A step may be too short for a knob of few values, so its next values are added.
        values = np.array([knob.from_unit(float(position)) for position in column])
        for shifted in (values - knob.multiple, values + knob.multiple):
            inside = np.clip(shifted, knob.low, knob.high)
            targets.append(np.array([knob.to_unit(float(value)) for value in inside]))
    return targets


def _perturbed(
    space: SearchSpace, best: FloatArray, count: int, rng: np.random.Generator
) -> FloatArray:
    """Return some of the best points with one or two knobs redrawn, shape ``count x d``.

    Better points are drawn more often. Numeric knobs move by normal steps of random scale.
    """
    free = np.array([i for i, knob in enumerate(space.knobs) if can_vary(knob)])
    points = best[np.minimum(rng.geometric(0.35, count) - 1, len(best) - 1)].copy()
    scale = rng.choice(_SCALES, count)
    order = rng.random((count, len(free))).argsort(axis=1)
    for rank in range(min(2, len(free))):
        changed = np.flatnonzero(rng.random(count) < 0.5**rank)
        dimension = free[order[changed, rank]]
        shift = scale[changed] * rng.standard_normal(len(changed))
        drawn = rng.random(len(changed))
        for index in free:
            rows, knob = changed[dimension == index], space.knobs[index]
            if isinstance(knob, CategoricalKnob):
                choices = len(knob.choices)
                level = np.floor(drawn[dimension == index] * choices)
                points[rows, index] = level / (choices - 1)
            else:
                moved = points[rows, index] + shift[dimension == index]
                points[rows, index] = np.clip(moved, 0.0, 1.0)
    return discretize(space, points)
