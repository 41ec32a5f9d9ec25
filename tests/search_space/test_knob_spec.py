"""One declaration for each knob: it says truly where its value goes, and when it applies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space import ModelProfile, ParameterProfile, Resources, horovod_settings
from hvd_autosync.search_space.catalogue import FAMILIES, REGISTRY
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan, exchange_plan
from hvd_autosync.search_space.knob_spec import KnobSpec, PlanField, Situation
from hvd_autosync.search_space.protocol import Protocol, protocol_of
from hvd_autosync.search_space.registry import KnobRegistry
from hvd_autosync.search_space.schedule import DEFAULT_CAP, Schedule, schedule_of

#: Strategies under which each part of a plan is there, whatever its other fields are.
_PARTS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "exchange": (exchange_plan, {}, ExchangePlan()),
    "schedule": (
        schedule_of,
        {"local_steps": 4, "local_power": 2, "local_alpha": 0.01},
        Schedule(4, 2, 0.01, cap=DEFAULT_CAP),
    ),
    "protocol": (protocol_of, {"protocol": "asp"}, Protocol("asp")),
}


def fields_of(part: Any) -> dict[str, Any]:
    """The fields of a plan, those of a class as ``large.codec``."""
    found = {}
    for name, value in vars(part).items():
        inner = vars(value) if isinstance(value, ClassPlan) else {}
        found |= {f"{name}.{field}": own for field, own in inner.items()} or {name: value}
    return found


@pytest.mark.parametrize(
    "spec", [s for s in REGISTRY if isinstance(s.sets, PlanField)], ids=lambda spec: spec.name
)
def test_a_knob_of_the_optimizer_sets_the_declared_field_and_no_other(spec: KnobSpec) -> None:
    assert isinstance(spec.sets, PlanField)
    make, base, before = _PARTS[spec.sets.part]
    value = next(
        v
        for v in (spec.knob.from_unit(u) for u in (0.9, 0.5, 0.0))
        if v not in (spec.knob.default, base.get(spec.name))
    )
    old, new = fields_of(before), fields_of(make({**base, spec.name: value}))
    assert {name for name in old if old[name] != new[name]} == {spec.sets.name}
    assert horovod_settings({spec.name: value}).options == ()


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
