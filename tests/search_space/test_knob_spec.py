"""One declaration for each knob: it says truly where its value goes, and when it applies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space import ModelProfile, ParameterProfile, Resources, horovod_settings
from hvd_autosync.search_space.catalogue import FAMILIES, REGISTRY
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.knob_spec import KnobSpec, PlanField, Situation
from hvd_autosync.search_space.knobs import integer_knob
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.search_space.registry import KnobRegistry
from hvd_autosync.search_space.schedule import DEFAULT_CAP, Schedule
from hvd_autosync.search_space.sync_plan import exchange_plan, protocol_of, schedule_of


def test_a_knob_is_mapped_onto_the_plan_by_its_declaration_alone() -> None:
    registry = KnobRegistry(FAMILIES)
    for name, target in (
        ("pieces", PlanField("exchange", "rest.slices")),
        ("groups", PlanField("exchange", "buckets")),
        ("patience", PlanField("schedule", "warmup")),
        ("lead", PlanField("protocol", "staleness")),
    ):
        registry.add(KnobSpec(integer_knob(name, 1, 9, 1, help=""), sets=target, when=""))
    ours = {"pieces": 3, "groups": 4, "patience": 5, "lead": 6}
    strategy = ours | {"local_steps": 8, "protocol": "ssp"}

    plan = ExchangePlan(buckets=4, rest=ClassPlan(slices=3))
    assert exchange_plan(strategy, registry) == plan
    assert schedule_of(strategy, registry) == Schedule(8, warmup=5, cap=DEFAULT_CAP)
    assert protocol_of(strategy, registry) == Protocol("ssp", 6)
    assert horovod_settings(ours, registry).environment == ()

    assert exchange_plan(strategy) is None, "the catalogue of this process has no such knobs"


def test_a_knob_follows_the_knob_on_which_it_depends() -> None:
    seen: set[str] = set()
    for spec in REGISTRY:
        assert spec.knob.condition is None or spec.knob.condition.knob in seen
        seen.add(spec.name)


def test_registries_of_the_same_families_are_apart() -> None:
    first, second = KnobRegistry(FAMILIES), KnobRegistry(FAMILIES)
    first.add_choice("large_exchange", "mine")
    assert "mine" in first["large_exchange"].knob.choices  # type: ignore[union-attr]
    assert "mine" not in second["large_exchange"].knob.choices  # type: ignore[union-attr]
    assert "mine" not in first.own_choices("exchange")
    with pytest.raises(SpaceError, match="unknown knob 'speed'"):
        first["speed"]


def test_a_situation_knows_the_classes_of_dense_gradients(slow_network: Resources) -> None:
    matrix = ParameterProfile("matrix", (1024, 1024), "float32", ready_order=0)
    table = replace(matrix, name="table", touched_rows=0.01)
    bias = ParameterProfile("bias", (1024,), "float32", ready_order=1)

    def found(*parameters: ParameterProfile) -> frozenset[str]:
        return Situation(ModelProfile(parameters), slow_network).dense_classes

    assert found(matrix, table, bias) == {"embedding", "large", "rest"}
    assert found(matrix, replace(table, ready_order=-1), replace(bias, sparse=True)) == {"large"}
