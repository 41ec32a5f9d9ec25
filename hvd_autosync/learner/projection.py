"""Projection of points of one search space onto another."""

from __future__ import annotations

import numpy as np

from hvd_autosync.learner.points import FloatArray, discretize
from hvd_autosync.search_space import CategoricalKnob, Knob, SearchSpace, Value


def project_onto_space(space: SearchSpace, points: FloatArray, other: SearchSpace) -> FloatArray:
    """Return the points of ``other`` nearest to those of ``space``, knob by knob.

    Knobs that only ``space`` has are left out. Knobs that only ``other`` has get the value that
    ``space`` fixes, or their default. Choices that ``other`` does not have become the default;
    numbers are clipped to its bounds.

    Args:
        space: The space of the points.
        points: Discretized points, shape ``n x d``.
        other: Another space, of dimension ``d'``.

    Returns:
        Discretized points of ``other``, shape ``n x d'``.
    """
    fixed = dict(space.fixed)
    places = {knob.name: index for index, knob in enumerate(space.knobs)}
    found = np.empty((len(points), other.dimension))
    for index, knob in enumerate(other.knobs):
        if knob.name not in places:
            found[:, index] = _place(knob, fixed.get(knob.name, knob.default))
            continue
        own = places[knob.name]
        unique, inverse = np.unique(points[:, own], return_inverse=True)
        values = [space.knobs[own].from_unit(float(position)) for position in unique]
        found[:, index] = np.array([_place(knob, value) for value in values])[inverse]
    return discretize(other, found)


def _place(knob: Knob, value: Value) -> float:
    """Return the position of ``value``, or of the nearest one, in the domain of ``knob``."""
    if isinstance(knob, CategoricalKnob):
        same = [c for c in knob.choices if type(c) is type(value) and c == value]
        return knob.to_unit(same[0] if same else knob.default)
    if isinstance(value, (str, bool)):
        return knob.to_unit(knob.default)
    return knob.to_unit(min(max(value, knob.low), knob.high))
