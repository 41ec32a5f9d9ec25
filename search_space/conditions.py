"""Which knobs matter at many points of a search space at once."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from hvd_autosync.search_space.knobs import Value
from hvd_autosync.search_space.space import SearchSpace, codec_beside


def active(space: SearchSpace, points: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Return whether each knob is switched on at each point, shape ``n x d``.

    Args:
        space: The space, of dimension d.
        points: Positions of the knobs, ``n x d``.
    """
    holds = np.ones(points.shape, dtype=np.bool_)
    fixed = dict(space.fixed)
    column = {knob.name: index for index, knob in enumerate(space.knobs)}

    def among(name: str, values: Collection[Value]) -> npt.NDArray[np.bool_]:
        """Return whether a free knob has one of some values, shape ``(n,)``."""
        unique, inverse = np.unique(points[:, column[name]], return_inverse=True)
        decoded = [space[name].from_unit(float(position)) for position in unique]
        return np.array([value in values for value in decoded], dtype=np.bool_)[inverse]

    for index, condition in enumerate(knob.condition for knob in space.knobs):
        if condition is None:
            continue
        if condition.knob not in column:
            holds[:, index] = condition.holds(fixed)
            continue
        holds[:, index] = holds[:, column[condition.knob]] & among(condition.knob, condition.values)
    for index, codec in enumerate(codec_beside(knob.name) for knob in space.knobs):
        if codec in column:
            holds[:, index] &= ~holds[:, column[codec]] | among(codec, ("none",))
        else:
            holds[:, index] &= fixed.get(codec, "none") == "none"
    return holds
