"""The cost model's buckets are those that the runtime makes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hvd_autosync.cost import CostModel
from hvd_autosync.cost.columns import Columns
from hvd_autosync.learner.points import sobol_points
from hvd_autosync.runtime.exchange.buckets import split_evenly
from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    Link,
    Links,
    ModelProfile,
    ParameterProfile,
    Resources,
    Strategy,
    build_space,
)
from hvd_autosync.search_space.exchange_plan import (
    BY_FACTORS,
    ClassPlan,
    ExchangePlan,
    can_send_factors,
    class_of,
    parameter_classes,
)
from hvd_autosync.search_space.sync_plan import exchange_plan

_BUCKET_BYTES = 8 * 1024 * 1024


def sizes_sent(model: ModelProfile, strategy: Strategy, ranks: int) -> list[int]:
    """Bytes of each bucket, by the rules of ``runtime/exchange/planning.py``; pieces are one."""
    plan = exchange_plan(strategy) or ExchangePlan()
    classes = parameter_classes(model)
    lanes: dict[ClassPlan, list[int]] = {}
    alone = []
    for parameter in sorted(model.parameters, key=lambda p: p.ready_order):
        own = plan.of(class_of(parameter.name, classes))
        by_factors = own.exchange in BY_FACTORS and can_send_factors(parameter, ranks)
        if own.exchange == "rows" or by_factors:
            alone.append(parameter.size_bytes)
        else:
            if own.exchange in BY_FACTORS:
                own = replace(own, exchange="allreduce")
            lanes.setdefault(own, []).append(parameter.size_bytes)
    total = sum(sum(sizes) for sizes in lanes.values())
    for own, sizes in lanes.items():
        if own.slices > 1 or own.codec == "powersgd":
            count = len(sizes)
        elif plan.buckets:
            count = max(round(plan.buckets * sum(sizes) / total), 1)
        elif (own.exchange, own.codec) == ("allreduce", "none"):
            count = len(sizes)
        else:
            count = math.ceil(sum(sizes) / _BUCKET_BYTES)
        if plan.rule == "size":
            sizes = sorted(sizes, reverse=True)
        groups = [[i] for i in range(len(sizes))]
        if count < len(sizes):
            groups = split_evenly(sizes, count)
        alone += [sum(sizes[i] for i in group) for group in groups]
    return sorted(alone)


def with_factors(model: ModelProfile) -> ModelProfile:
    """``model`` with two linear layers more: by factors only one of them is fewer bytes.

    Its own matrix belongs to no linear layer.
    """
    few, many = (
        ParameterProfile(name, (512, 512), "float32", False, order, 0.021, factor_bytes=count)
        for name, order, count in (("few", 22, 40_000), ("many", 23, 600_000))
    )
    return replace(model, parameters=(*model.parameters, few, many))


@pytest.mark.parametrize("factors", [False, True], ids=["", "factors"])
@pytest.mark.parametrize("allow", [(), ("codec",)])
def test_buckets_are_those_of_the_runtime(
    model: ModelProfile, slow_network: Resources, allow: tuple[str, ...], factors: bool
) -> None:
    if factors:
        model = with_factors(model)
    space = build_space(model, slow_network, held={"controller": "gloo"}, allow=allow)
    strategies = [space.decode(point) for point in sobol_points(space, 200, 0)]
    items = CostModel(model, slow_network).prepare(Columns.of(strategies)).items
    assert items is not None
    for index, strategy in enumerate(strategies):
        found = items.size_bytes[:, index]
        sizes = sizes_sent(model, strategy, slow_network.world_size)
        assert sorted(found[found > 0].astype(int)) == sizes, strategy
    chosen = {s.get("large_exchange") for s in strategies}
    assert chosen & {*BY_FACTORS} == ({*BY_FACTORS} if factors else set())
    assert np.allclose(items.size_bytes.sum(axis=0), model.size_bytes)
    assert {s["bucket_rule"] for s in strategies if s.get("buckets")} == {"ordered", "size"}


def test_buckets_by_size_that_hold_one_gradient_each_are_not_late(
    model: ModelProfile, slow_network: Resources
) -> None:
    """Nothing waits for the end of backward then: they travel as they are complete."""
    several = Strategy({"buckets": len(model.parameters) + 1, "bucket_rule": "size"})
    few = several.replacing(buckets=1)
    cost = CostModel(model, slow_network)
    rules = ("size", "ordered")
    strategies = [s.replacing(bucket_rule=rule) for s in (several, few) for rule in rules]
    single_by_size, single, one_by_size, one = cost.predict(strategies)
    assert single_by_size == single
    assert one_by_size >= one
    items = cost.prepare(Columns.of(strategies)).items
    assert items is not None
    late = np.where(items.size_bytes > 0, items.arrival_s, np.inf).min(axis=0)
    assert late[0] == late[1] < late[2]


def test_a_bucket_by_size_is_complete_when_its_last_gradient_is() -> None:
    """The large ones are of the first half of backward; the small ones wait for the last."""
    sizes = (100, 7, 90, 6, 80, 5, 4, 3)
    parameters = tuple(
        ParameterProfile(f"p{i}", (size,), "float32", False, i, 0.01 * (i + 1))
        for i, size in enumerate(sizes)
    )
    model = ModelProfile(parameters, forward_s=0.05, backward_s=0.08)
    link = Link(2, latency_s=1e-4, bandwidth_bytes_per_s=1e6)
    build = HorovodBuild("0.28.1", gloo=True, mpi=False)
    resources = Resources((Host("a", 1), Host("b", 1)), "cpu", build, Links(overall=link))
    strategy = Strategy({"buckets": 3, "bucket_rule": "size"})
    items = CostModel(model, resources).prepare(Columns.of([strategy])).items
    assert items is not None
    there = np.flatnonzero(items.size_bytes[:, 0])
    # By size: 100 | 90 80 | 7 6 5 4 3.
    assert (items.size_bytes[there, 0] / 4).tolist() == [100.0, 170.0, 25.0]
    assert items.arrival_s[there, 0] == pytest.approx([0.01, 0.05, 0.08])
    assert items.wire_s[there, 0] == pytest.approx(4e-6 * np.array([100.0, 170.0, 25.0]))
