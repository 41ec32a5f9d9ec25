"""The inputs of the cost model: the knobs whose declarations name a term."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvd_autosync.cost import CostModel
from hvd_autosync.cost.coefficients import UNCALIBRATED
from hvd_autosync.cost.columns import Columns
from hvd_autosync.learner.points import sobol_points
from hvd_autosync.search_space import (
    ModelProfile,
    ParameterProfile,
    Resources,
    build_space,
    restrict_space,
)
from hvd_autosync.search_space.catalogue import REGISTRY
from hvd_autosync.search_space.knob_spec import KnobSpec


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


#: Strategies under which conditional knobs have an effect.
BASES: tuple[dict[str, Any], ...] = (
    {},
    {"fusion_threshold_bytes": 0},
    {"buckets": 4},
    {"embedding_codec": "topk", "large_codec": "topk"},
    {"large_codec": "powersgd"},
    {"local_steps": 512, "local_power": 2},
    {"protocol": "ssp", "total_samples": 1000},
    {"protocol": "asp", "sync_share": 0.5, "total_samples": 1000},
    {"large_exchange": "sharded"},
)


@pytest.fixture
def repeating(model: ModelProfile) -> ModelProfile:
    """A model whose gradients' bits repeat, with a linear layer."""

    def coded(p: ParameterProfile) -> ParameterProfile:
        factors = 1000 if p.name == "matrix" else 0
        return replace(p, coded_share=0.3, summed_share=0.4, factor_bytes=factors)

    return replace(model, parameters=tuple(map(coded, model.parameters)))


@pytest.mark.parametrize("spec", [*REGISTRY], ids=lambda spec: spec.name)
def test_a_knob_has_a_term_if_it_changes_a_prediction(
    spec: KnobSpec, repeating: ModelProfile, slow_network: Resources
) -> None:
    cost = CostModel(repeating, slow_network)
    values = {spec.knob.from_unit(position) for position in np.linspace(0, 1, 8)}
    changed = False
    for base in BASES:
        seconds = cost.predict([{**base, spec.name: value} for value in values])
        changed = changed or bool(np.ptp(seconds) > 1e-9)
    assert changed == bool(spec.cost)


@pytest.mark.parametrize("name", ["hierarchical_allreduce", "of_no_declaration"])
def test_the_cost_model_cannot_read_a_knob_without_a_term(
    name: str, model: ModelProfile, slow_network: Resources
) -> None:
    space = build_space(model, slow_network, held={name: True})
    for columns in (Columns.of([{name: True}]), Columns.at(space, sobol_points(space, 4, 0))):
        with pytest.raises(KeyError, match=name):
            columns.words(name)


def test_averages_cost_what_the_codec_of_changes_does(
    model: ModelProfile, slow_network: Resources
) -> None:
    def seconds(codec: str, steps: int) -> float:
        strategy = {"large_codec": codec, "rest_codec": codec, "local_steps": steps}
        return float(CostModel(model, slow_network).predict([strategy])[0])

    assert seconds("fp16", 1) != seconds("bf16", 1)
    assert seconds("fp16", 4) == seconds("bf16", 4)
