"""Which knobs matter at many points of a search space at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hvd_autosync.search_space.space import SearchSpace


def active(space: SearchSpace, points: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Return whether each knob's condition holds at each point, shape ``n x d``.

    Args:
        space: The space, of dimension d.
        points: Positions of the knobs, ``n x d``.
    """
    holds = np.ones(points.shape, dtype=np.bool_)
    fixed = dict(space.fixed)
    column = {knob.name: index for index, knob in enumerate(space.knobs)}
    for index, condition in enumerate(knob.condition for knob in space.knobs):
        if condition is None:
            continue
        if condition.knob not in column:
            holds[:, index] = condition.holds(fixed)
            continue
        parent = column[condition.knob]
        unique, inverse = np.unique(points[:, parent], return_inverse=True)
        values = [space.knobs[parent].from_unit(float(position)) for position in unique]
        switched_on = np.array(
            [condition.holds({condition.knob: value}) for value in values], dtype=np.bool_
        )
        holds[:, index] = holds[:, parent] & switched_on[inverse]
    return holds
