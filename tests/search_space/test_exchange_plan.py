"""The exchange knobs as a plan, and the classes of parameters."""

from __future__ import annotations

import pytest

from hvd_autosync.search_space import CATALOGUE, ModelProfile, ParameterProfile, Strategy
from hvd_autosync.search_space.exchange_plan import (
    ClassPlan,
    ExchangePlan,
    class_of,
    parameter_classes,
)
from hvd_autosync.search_space.sync_plan import exchange_plan


def test_without_exchange_knobs_the_exchange_is_horovods() -> None:
    assert exchange_plan(Strategy({"cycle_time_ms": 2.0})) is None
    defaults = {knob.name: knob.default for knob in CATALOGUE}
    assert exchange_plan(defaults) is None


def test_every_exchange_knob_changes_the_plan() -> None:
    for knob in CATALOGUE:
        if knob.group in ("exchange", "codec"):
            values = (knob.from_unit(u) for u in (0.0, 0.5, 1.0))
            other = next(value for value in values if value != knob.default)
            assert exchange_plan({knob.name: other}) is not None, knob.name


def test_knobs_become_the_plan_of_their_class() -> None:
    plan = exchange_plan(
        {
            "buckets": 4,
            "bucket_rule": "size",
            "large_codec": "powersgd",
            "large_rank": 4,
            "embedding_exchange": "rows",
        }
    )
    assert plan == ExchangePlan(
        4, "size", "arrival", ClassPlan("rows"), ClassPlan(codec="powersgd", rank=4), ClassPlan()
    )
    assert not plan.two_levels


@pytest.mark.parametrize(
    ("dtype", "size"), [("complex128", 16), ("float32", 4), ("float8_e5m2", 1)]
)
def test_a_matrix_is_large_by_its_bytes(dtype: str, size: int) -> None:
    rows = 256 * 1024 // size // 64
    model = ModelProfile(tuple(ParameterProfile(str(n), (n, 64), dtype) for n in (rows - 1, rows)))
    assert parameter_classes(model) == {"large": (str(rows),)}
    assert model.size_bytes == (2 * rows - 1) * 64 * size


def test_classes_follow_what_was_measured() -> None:
    def parameter(name: str, *shape: int, **more: object) -> ParameterProfile:
        return ParameterProfile(name, shape, "float32", **more)  # type: ignore[arg-type]

    model = ModelProfile(
        (
            parameter("table", 50_000, 16, touched_rows=0.02),
            parameter("sparse", 10, 4, sparse=True),
            parameter("output", 50_000, 16, touched_rows=1.0),
            parameter("conv", 256, 64, 3, 3),
            parameter("small", 16, 16, touched_rows=0.1),
            parameter("vector", 1_000_000),
        )
    )
    classes = parameter_classes(model)
    assert classes == {"embedding": ("table", "sparse"), "large": ("output", "conv")}
    found = [class_of(p.name, classes) for p in model.parameters]
    assert found == ["embedding", "embedding", "large", "large", "rest", "rest"]


def test_names_may_be_patterns() -> None:
    classes = {"large": ("*.weight",), "embedding": ("table.weight",)}
    assert class_of("table.weight", classes) == "embedding"  # the first class that fits
    assert class_of("fc.weight", classes) == "large"
    assert class_of("fc.bias", classes) == "rest"
