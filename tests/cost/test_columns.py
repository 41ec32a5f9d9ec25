from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_autosync.cost import CostModel
from hvd_autosync.cost.coefficients import UNCALIBRATED
from hvd_autosync.cost.columns import Columns
from hvd_autosync.learner.points import sobol_points
from hvd_autosync.search_space import ModelProfile, Resources, build_space, restrict_space


@pytest.mark.parametrize(
    "restrictions",
    [{}, {"large_codec": {"fixed": "int8"}, "embedding_codec": {"choices": ["fp16", "bf16"]}}],
    ids=["whole", "restricted"],
)
def test_points_are_as_their_strategies(
    model: ModelProfile, slow_network: Resources, restrictions: dict[str, Any]
) -> None:
    """Held knobs count, and what a switched off knob stands at does not matter."""
    whole = build_space(model, slow_network, held={"cycle_time_ms": 40.0}, allow=("codec", "order"))
    space = restrict_space(whole, {"knobs": restrictions})
    points = sobol_points(space, 200, 0)
    cost = CostModel(model, slow_network)
    found = cost.prepare(Columns.at(space, points)).seconds([UNCALIBRATED])[0]
    strategies = [{**dict(space.fixed), **space.decode(point)} for point in points]
    assert np.array_equal(found, cost.predict(strategies))
    assert not np.array_equal(found, cost.predict([space.decode(point) for point in points]))
