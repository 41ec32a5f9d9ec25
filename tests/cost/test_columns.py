from __future__ import annotations

import numpy as np

from hvd_autosync.cost import CostModel
from hvd_autosync.cost.coefficients import UNCALIBRATED
from hvd_autosync.cost.columns import Columns
from hvd_autosync.learner.points import sobol_points
from hvd_autosync.search_space import ModelProfile, Resources, build_space


def test_points_are_as_their_strategies(model: ModelProfile, slow_network: Resources) -> None:
    """Held knobs count, and what a switched off knob stands at does not matter."""
    space = build_space(model, slow_network, held={"cycle_time_ms": 40.0}, allow=("codec", "order"))
    points = sobol_points(space, 200, 0)
    cost = CostModel(model, slow_network)
    found = cost.prepare(Columns.at(space, points)).seconds([UNCALIBRATED])[0]
    strategies = [{**dict(space.fixed), **space.decode(point)} for point in points]
    assert np.array_equal(found, cost.predict(strategies))
    assert not np.array_equal(found, cost.predict([space.decode(point) for point in points]))
