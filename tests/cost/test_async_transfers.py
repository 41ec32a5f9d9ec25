"""Steps without a barrier, as the cost model sees them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hvd_autosync.cost import Coefficients, CostModel, calibrate
from hvd_autosync.cost.async_transfers import async_transfers
from hvd_autosync.cost.gradients import Gradients
from hvd_autosync.runtime.sync.shards import make_buckets
from hvd_autosync.search_space import Host, Link, Links, ModelProfile, Resources, Value

ASP: dict[str, Value] = {"protocol": "asp"}
LONGER_WIRE = Coefficients(byte=float(np.log(2)))


def test_buckets_are_those_of_the_runtime(model: ModelProfile, slow_network: Resources) -> None:
    order = sorted(model.parameters, key=lambda each: each.ready_order)
    parameters = [torch.nn.Parameter(torch.zeros(each.shape)) for each in order]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    expected = [
        4 * sum(parameter.numel() for parameter in bucket.parameters)
        for bucket in make_buckets(optimizer, parameters, 4)
    ]
    sizes = async_transfers(Gradients.of(model), slow_network, 1).size_bytes[:, 0]
    assert sizes[sizes > 0].tolist() == expected


@pytest.mark.parametrize(("slots", "share"), [(1, 1.0), (2, 4 / 3)])
def test_owners_get_and_answer_what_leaves_a_host(
    model: ModelProfile, slow_network: Resources, slots: int, share: float
) -> None:
    """Between hosts of one rank as many bytes as a ring; of two ranks 2.0 for a ring's 1.5."""
    hosts = (Host("a", slots), Host("b", slots))
    links = Links(Link(2 * slots, 1e-3, 1e7), None, Link(2, 1e-3, 1e7))
    cost = CostModel(model, replace(slow_network, hosts=hosts, links=links))
    wire_s = cost.predict([{}, ASP], LONGER_WIRE) - cost.predict([{}, ASP])
    assert wire_s[1] / wire_s[0] == pytest.approx(share, rel=0.01)


def test_nothing_waits_for_cycles_and_negotiation(
    model: ModelProfile, slow_network: Resources
) -> None:
    fast = Links(Link(4, 2e-3, 1e9), slow_network.links.within, slow_network.links.across)
    cost = CostModel(model, replace(slow_network, links=fast))
    at = [{**each, "cycle_time_ms": ms} for each in ({}, ASP) for ms in (1.0, 100.0)]
    undisturbed = Coefficients(contention=-20.0)
    bsp, bsp_later, asp, asp_later = cost.predict(at, undisturbed)
    assert bsp_later - bsp > 0.01
    assert asp_later == pytest.approx(asp)
    # One answer is waited for, however many buckets there are.
    longer = replace(undisturbed, latency=float(np.log(2)))
    later = cost.predict([ASP], longer)[0] - cost.predict([ASP], undisturbed)[0]
    assert later == pytest.approx(2e-3)


def test_codecs_and_local_steps_change_nothing_without_a_barrier(
    model: ModelProfile, slow_network: Resources
) -> None:
    cost = CostModel(model, slow_network)
    asp, coded, local = cost.predict(
        [ASP, {**ASP, "large_codec": "fp16", "buckets": 3}, {**ASP, "local_steps": 8}]
    )
    assert asp == coded == local


def test_a_switch_takes_the_mean_of_its_phases(
    model: ModelProfile, slow_network: Resources
) -> None:
    cost = CostModel(model, slow_network)
    known = {**ASP, "total_samples": 10_000}
    switched = [{**known, "sync_share": share} for share in (0.0, 0.25, 1.0)]
    bsp, never, quarter, always = cost.predict([{}, *switched])
    assert always == bsp != never
    assert quarter == pytest.approx(0.25 * bsp + 0.75 * never)
    # A share has no effect without its phase or without the number of samples.
    unknown = cost.predict([{"sync_share": 0.25}, {**ASP, "sync_share": 0.25}])
    assert unknown.tolist() == [bsp, bsp]


def test_trials_without_a_barrier_calibrate(model: ModelProfile, slow_network: Resources) -> None:
    cost = CostModel(model, slow_network)
    tried = [{}, ASP, {**ASP, "sync_share": 0.5, "total_samples": 1000}]
    found = calibrate(cost, tried, cost.predict(tried, Coefficients(byte=0.3)))
    assert found.coefficients.byte == pytest.approx(0.3, abs=0.1)


def test_one_rank_pushes_nothing(model: ModelProfile, slow_network: Resources) -> None:
    alone = replace(slow_network, hosts=(Host("a", 1),), links=Links())
    bsp, asp = CostModel(model, alone).predict([{}, ASP])
    assert bsp == asp
