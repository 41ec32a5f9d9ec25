"""The declared cost terms: a knob changes a prediction if and only if it has one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvd_autosync.cost import CostModel
from hvd_autosync.cost.terms import TERMS
from hvd_autosync.search_space import ModelProfile, ParameterProfile, Resources
from hvd_autosync.search_space.catalogue import REGISTRY
from hvd_autosync.search_space.knob_spec import KnobSpec

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
    assert not spec.cost or spec.cost in TERMS
    cost = CostModel(repeating, slow_network)
    values = {spec.knob.from_unit(position) for position in np.linspace(0, 1, 8)}
    changed = False
    for base in BASES:
        seconds = cost.predict([{**base, spec.name: value} for value in values])
        changed = changed or bool(np.ptp(seconds) > 1e-9)
    assert changed == bool(spec.cost)


def test_every_term_has_a_knob() -> None:
    assert {spec.cost for spec in REGISTRY} - {""} == set(TERMS)
