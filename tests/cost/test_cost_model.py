from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hvd_autosync.cost import Coefficients, CostModel, exchange_costs
from hvd_autosync.cost.columns import Columns
from hvd_autosync.cost.hypothetical import hypothetical_resources
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.search_space import (
    Host,
    Link,
    Links,
    ModelProfile,
    ParameterProfile,
    Resources,
    Value,
)

GRADIENT_BYTES = 100_000 * 16 * 4 + 1024 * 1024 * 4 + 20 * 256 * 4


def test_a_slow_network_decides(model: ModelProfile, slow_network: Resources) -> None:
    """The default step is computation, and what the network needs for the bytes.

    What travels behind backward is no gain for processors, which do both.
    """
    cost, wire_s = CostModel(model, slow_network), GRADIENT_BYTES * 1.5 / 12.5e6
    assert wire_s < cost.predict([{}])[0] < wire_s + 0.032 + 0.02 + 0.03
    undisturbed = cost.predict([{}], Coefficients(contention=-20.0))[0]
    assert wire_s < undisturbed < wire_s + 0.031 + 0.02
    assert undisturbed < cost.predict([{}])[0]


def test_accelerators_send_while_they_compute(model: ModelProfile, slow_network: Resources) -> None:
    build = replace(slow_network.build, nccl=True)
    on_gpus = replace(slow_network, device="NVIDIA H100", build=build)
    there, here = (CostModel(model, each).predict([{}])[0] for each in (on_gpus, slow_network))
    assert there < here


def test_one_rank_sends_nothing(model: ModelProfile, slow_network: Resources) -> None:
    alone = replace(slow_network, hosts=(Host("a", 1),), links=Links())
    seconds = CostModel(model, alone).predict([{}, {"buckets": 4}, {"large_codec": "fp16"}])
    assert seconds.tolist() == pytest.approx([0.032] * 3)


def test_each_exchange_saves_what_it_should(model: ModelProfile, slow_network: Resources) -> None:
    strategies = [
        {},
        {"embedding_exchange": "rows"},
        {"embedding_exchange": "hierarchical", "large_exchange": "hierarchical"},
        {"large_codec": "fp16"},
        {"large_codec": "int8"},
        {"large_codec": "topk", "large_ratio": 0.01},
        {"large_codec": "powersgd", "large_rank": 2},
        {"large_exchange": "sharded"},
        {"large_exchange": "hierarchical", "large_codec": "topk", "large_ratio": 0.1},
        {"large_exchange": "hierarchical", "large_codec": "powersgd", "large_rank": 16},
    ]
    seconds = CostModel(model, slow_network).predict(strategies)
    saved = seconds[0] - seconds
    ring = 1.5 / 12.5e6  # seconds per byte
    table, matrix = 100_000 * 16 * 4, 1024 * 1024 * 4
    expected = {
        1: table * ring - 4 * 1000 * (16 * 4 + 4) / 2 * ring,
        2: (table + matrix) * (ring - 1 / 12.5e6 - 1.5 / 2e9),
        3: matrix * ring * 0.5,
        4: matrix * ring * (1 - 0.2539),
        5: matrix * ring * (1 - 4 * 0.01 * 8 / 4 / 2),
        6: matrix * ring * (1 - 2 * 2048 / 1024**2),
        7: -matrix * ring * (1.75 / 1.5 - 1),  # an alltoall and an allgather
        # Between two hosts, where each of two ranks has half of the rows.
        8: matrix * (ring - 1.5 / 2e9 - 2 * 0.1 * 8 / 4 / 2 / 12.5e6),
        9: matrix * (ring - 1.5 / 2e9 - 16 * (1024 + 2 * 1024) / 1024**2 / 12.5e6),
    }
    for index, value in expected.items():
        assert saved[index] == pytest.approx(value, abs=0.05), strategies[index]


def test_a_table_that_fills_up_travels_whole(model: ModelProfile, slow_network: Resources) -> None:
    table = replace(model.parameters[0], touched_rows=0.3)  # four ranks touch more than it has
    full = replace(model, parameters=(table, *model.parameters[1:]))
    plain, rows = CostModel(full, slow_network).predict([{}, {"embedding_exchange": "rows"}])
    assert plain <= rows < 1.05 * plain


def test_long_cycles_cost_each_operation_of_an_exchange(
    model: ModelProfile, slow_network: Resources
) -> None:
    at = [
        {"embedding_exchange": e, "cycle_time_ms": c}
        for e in ("allreduce", "rows")
        for c in (1.0, 101.0)
    ]
    plain, plain_long, rows, rows_long = CostModel(model, slow_network).predict(at)
    assert rows_long - rows > 0.15 > plain_long - plain


def test_waiting_never_makes_a_step_shorter(
    model: ModelProfile, slow_network: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exchange of more operations, and a longer cycle, let the last of them end later."""
    large = replace(model.parameters[1], factor_bytes=1_000_000, coded_factors_share=0.5)
    parameters = (model.parameters[0], large, *model.parameters[2:])
    model = replace(model, parameters=parameters, backward_s=0.1)
    alike = {"large_exchange": "factors", "embedding_exchange": "rows"}
    cost = CostModel(model, slow_network)
    of_cycles = cost.predict([{**alike, "cycle_time_ms": c} for c in (10.0, 20.0, 50.0, 100.0)])
    assert (np.diff(of_cycles) > 0).all()
    of_operations = []
    for operations in (2.0, 3.0, 4.0, 6.0):
        monkeypatch.setitem(exchange_costs._OPERATIONS, "factors", operations)
        of_operations.append(cost.predict([{"large_exchange": "factors"}, alike]))
    assert (np.diff(of_operations, axis=0) >= 0).all()
    assert (of_operations[-1] > of_operations[0]).all()


def test_buckets_follow_the_bytes(model: ModelProfile, slow_network: Resources) -> None:
    """One bucket waits for all of backward; several small ones cost an operation each.

    With processors that do not send while they compute, waiting costs nothing.
    """
    fast = replace(
        slow_network.links, overall=replace(slow_network.links.overall, bandwidth_bytes_per_s=1e9)
    )
    cluster = replace(slow_network, links=fast)
    at = [{"buckets": n, "cycle_time_ms": 0.1, "fusion_threshold_bytes": 0} for n in (0, 1, 4, 22)]
    none, _, _, every = CostModel(model, cluster).predict(at)
    assert every == none  # a bucket for each is none at all
    undisturbed = Coefficients(contention=-20.0)
    none, one, four, every = CostModel(model, cluster).predict(at, undisturbed)
    assert four < one < every == none


def test_priority_hides_up_to_a_forward(model: ModelProfile, slow_network: Resources) -> None:
    """Unless Horovod fuses all that waits: then all of it ends together."""
    order = {"order": "priority"}
    at = [{}, order, *({**each, "fusion_threshold_bytes": 0} for each in ({}, order))]
    cost, undisturbed = CostModel(model, slow_network), Coefficients(contention=-20.0)
    plain, late, plain_alone, late_alone = cost.predict(at, undisturbed)
    assert plain_alone - late_alone == pytest.approx(model.forward_s, rel=1e-3)
    assert plain - late == 0.0
    # Processors do both, behind forward as behind backward.
    _, _, plain_alone, late_alone = cost.predict(at)
    assert late_alone > plain_alone


def test_looks_slow_processors_down(model: ModelProfile, slow_network: Resources) -> None:
    """The more often Horovod looks, the more; no oftener than ranks can agree."""
    local = {"local_steps": 16}  # nothing to be found in most of the looks
    at = [{**local, "cycle_time_ms": each} for each in (0.01, 0.1, 1.0, 1.5, 2.0, 4.0)]
    seconds = CostModel(model, slow_network).predict(at)
    # An operation takes 2 ms. In each round its average waits for half a cycle.
    assert seconds[1] - seconds[0] == pytest.approx(0.09e-3 / 2 / 16)
    looks_s = 1.5 * (model.forward_s + model.backward_s) * 1.25e-4
    for index, (often, seldom) in enumerate(((1.0, 1.5), (1.5, 2.0), (2.0, 4.0)), start=2):
        saved = seconds[index] - seconds[index + 1]
        assert saved == pytest.approx(looks_s * (1e3 / often - 1e3 / seldom), abs=3e-4)
    on_gpus = CostModel(model, replace(slow_network, device="NVIDIA H100")).predict(at)
    assert 0 < on_gpus[2] - on_gpus[4] < (seconds[2] - seconds[4]) / 5


def test_a_disabled_response_cache_never_pays(model: ModelProfile, slow_network: Resources) -> None:
    """The background loop has fewer cycles without it, but no strategy is faster."""
    others = [{}, {"cycle_time_ms": 0.1}, {"local_steps": 16}, {"buckets": 4}, {"protocol": "asp"}]
    cost = CostModel(model, slow_network)
    uncached = cost.predict([{**each, "cache_capacity": 0} for each in others])
    assert (uncached >= cost.predict(others)).all()


def test_coefficients_scale_their_part(model: ModelProfile, slow_network: Resources) -> None:
    cost = CostModel(model, slow_network)
    base = cost.predict([{}])[0]
    twice = np.log(2)
    wire_s = GRADIENT_BYTES * 1.5 / 12.5e6
    assert cost.predict([{}], Coefficients(byte=twice))[0] - base == pytest.approx(wire_s, rel=0.05)
    assert cost.predict([{}], Coefficients(rest=twice))[0] - base == pytest.approx(1e-3)


def test_many_at_once_are_as_each_alone(model: ModelProfile, slow_network: Resources) -> None:
    cost = CostModel(model, slow_network)
    rng = np.random.default_rng(0)
    some = [
        {
            "buckets": int(rng.integers(0, 20)),
            "bucket_rule": str(rng.choice(["ordered", "size"])),
            "cycle_time_ms": float(rng.uniform(0.1, 50)),
            "fusion_threshold_bytes": int(rng.integers(0, 10**7)),
            "embedding_exchange": str(rng.choice(["allreduce", "rows", "hierarchical"])),
        }
        for _ in range(50)
    ]
    assert cost.predict(some).tolist() == [cost.predict([each])[0] for each in some]


def test_what_was_not_measured_is_named(model: ModelProfile, slow_network: Resources) -> None:
    with pytest.raises(ConfigurationError, match="links"):
        CostModel(model, replace(slow_network, links=Links()))
    with pytest.raises(ConfigurationError, match="times"):
        CostModel(replace(model, backward_s=float("nan")), slow_network)


def test_sparse_tables_travel_by_rows_in_any_case(
    model: ModelProfile, slow_network: Resources
) -> None:
    sparse = replace(model.parameters[0], sparse=True)
    cost = CostModel(replace(model, parameters=(sparse, *model.parameters[1:])), slow_network)
    rows: dict[str, Value] = {"embedding_exchange": "rows"}
    assert cost.predict([rows]) == pytest.approx(
        CostModel(model, slow_network).predict([rows]), rel=0.02
    )
    assert cost.predict([{"buckets": 22}]) == cost.predict([{**rows, "buckets": 22}])
    # Horovod's own optimizer gathers indices and values at once.
    items = cost.prepare(Columns.of([{}, {"cycle_time_ms": 2.0}, rows])).items
    assert items is not None
    assert items.operations.max(axis=0).tolist() == [1, 1, 3]


def test_horovod_sends_sparse_rows_as_often_as_a_batch_used_them(slow_network: Resources) -> None:
    """4096 tokens, 1200 of them different; every plan adds equal rows up before it sends them."""
    table = ParameterProfile(
        "table", (100_000, 256), "float32", True, 0, 0.02, touched_rows=0.012, stored_rows=0.041
    )
    across = Link(2, 1e-3, 12.5e6)
    two = replace(
        slow_network, hosts=(Host("a", 1), Host("b", 1)), links=Links(across, None, across)
    )
    cost = CostModel(ModelProfile((table,), forward_s=0.01, backward_s=0.02), two)
    plain, planned = (wire_s(cost, plan) for plan in ({}, {"buckets": 1}))
    assert planned == pytest.approx(0.099, rel=0.02)
    assert plain - planned == pytest.approx(0.24, rel=0.02)


def test_rounds_of_local_steps_average_dense_tables(
    model: ModelProfile, slow_network: Resources
) -> None:
    """Whatever the gradients are: they are not exchanged. The table's plan holds."""
    sparse = replace(model.parameters[0], sparse=True)
    cost = CostModel(replace(model, parameters=(sparse, *model.parameters[1:])), slow_network)
    dense = CostModel(model, slow_network)
    for plan in ({}, {"embedding_exchange": "rows"}, {"embedding_codec": "fp16", "buckets": 4}):
        rounds = {**plan, "local_steps": 8, "local_cap": 4}
        assert cost.predict([rounds]) == dense.predict([rounds])
        assert items_of(cost, rounds) == items_of(dense, rounds)


def items_of(cost: CostModel, strategy: dict[str, Value]) -> list[list[float]]:
    items = cost.prepare(Columns.of([strategy])).items
    assert items is not None
    return [items.size_bytes[:, 0].tolist(), items.wire_s[:, 0].tolist()]


def test_a_round_sends_the_rows_of_all_its_steps(
    model: ModelProfile, slow_network: Resources
) -> None:
    """A hundredth of the rows changes in a step, on each of four ranks."""
    only = replace(model, parameters=model.parameters[:1])
    cost = CostModel(only, slow_network)

    def sent_s(steps: int) -> float:
        columns = Columns.of([{"embedding_exchange": "rows", "local_steps": steps}])
        items = cost.prepare(columns).items
        assert items is not None
        return float(items.wire_s.sum())

    assert sent_s(4) == pytest.approx(4 * sent_s(1))
    whole = 100_000 * 16 * 4 * 1.5 / 12.5e6
    assert sent_s(16) == pytest.approx(16 * sent_s(1)) and sent_s(16) < whole
    assert sent_s(32) == sent_s(256) == pytest.approx(whole)


def test_owners_pay_for_an_alltoall(model: ModelProfile, slow_network: Resources) -> None:
    """Between two hosts of two ranks it sends 1.75 bytes for each, where a ring sends 1.5."""
    cost = CostModel(model, slow_network)
    exchanges = [{}, {"large_exchange": "sharded", "embedding_exchange": "sharded"}]
    twice = float(np.log(2))
    wire = [
        cost.predict([each], Coefficients(byte=twice))[0] - cost.predict([each])[0]
        for each in exchanges
    ]
    small = 20 * 256 * 4 / GRADIENT_BYTES
    assert wire[1] / wire[0] == pytest.approx((1 - small) * 1.75 / 1.5 + small, rel=0.02)
    one_level = replace(
        slow_network,
        hosts=(Host("a", 1), Host("b", 1)),
        links=Links(Link(2, 1e-3, 12.5e6), None, Link(2, 1e-3, 12.5e6)),
    )
    # A rank alone on its host uses one direction at a time.
    ring, owners = CostModel(model, one_level).predict(exchanges)
    assert owners == pytest.approx(1.5 * ring, rel=0.05)


def test_what_owners_have_stepped_travels_after_backward(
    model: ModelProfile, slow_network: Resources
) -> None:
    """However long backward is, that half of a ring's bytes overlaps with nothing."""
    large = replace(model, parameters=model.parameters[1:2], backward_s=100.0)
    early = replace(large, parameters=(replace(large.parameters[0], ready_s=0.01),))
    undisturbed = Coefficients(contention=-99.0)
    plain, owners = CostModel(early, slow_network).predict(
        [{}, {"large_exchange": "sharded"}], undisturbed
    )
    half_s = 1024 * 1024 * 4 * 0.75 / 12.5e6
    assert owners - plain == pytest.approx(half_s, rel=0.05)


@pytest.mark.parametrize(
    "knobs",
    [{"large_exchange": "hierarchical"}, {"large_lossless": True}, {"large_slices": 4}],
    ids=str,
)
def test_only_plain_allreduces_are_deferred(
    knobs: dict[str, Value], model: ModelProfile, slow_network: Resources
) -> None:
    single = replace(model, parameters=model.parameters[1:2])
    cost = CostModel(single, slow_network)
    for each, deferred in (({}, True), (knobs, False)):
        now = {**each, "fusion_threshold_bytes": 0}
        plain, late = cost.predict([now, {**now, "order": "priority"}])
        assert bool(plain != late) is deferred


def wire_s(cost: CostModel, strategy: dict[str, Value]) -> float:
    """Seconds that bytes take, as what twice as long a wire adds."""
    longer = Coefficients(byte=float(np.log(2)))
    return float(cost.predict([strategy], longer)[0] - cost.predict([strategy])[0])


def test_codes_that_cannot_be_added_travel_by_parts(
    model: ModelProfile, slow_network: Resources
) -> None:
    cost = CostModel(model, slow_network)
    matrix = 1024 * 1024 * 4 / GRADIENT_BYTES
    plain = wire_s(cost, {})
    for codec, share in (("fp16", 0.5), ("bf16", 0.5 * 1.75 / 1.5), ("int8", 0.254 * 1.75 / 1.5)):
        expected = 1 - matrix + matrix * share
        assert wire_s(cost, {"large_codec": codec}) / plain == pytest.approx(expected, rel=0.01)


def test_codes_have_their_bytes_whatever_elements_have(
    model: ModelProfile, slow_network: Resources
) -> None:
    matrix = replace(model.parameters[1], dtype="float64")
    cost = CostModel(replace(model, parameters=(matrix,)), slow_network)
    for codec, share in (("fp16", 0.25), ("int8", 0.127 * 1.75 / 1.5)):
        ratio = wire_s(cost, {"large_codec": codec}) / wire_s(cost, {})
        assert ratio == pytest.approx(share, rel=0.01)


def test_codecs_take_the_operations_that_they_make(
    model: ModelProfile, slow_network: Resources
) -> None:
    """The participation check, and an allreduce of halves or an allgather of the largest."""
    plans: list[dict[str, Value]] = [{}, {"large_codec": "fp16"}, {"large_codec": "topk"}]
    items = CostModel(model, slow_network).prepare(Columns.of(plans)).items
    assert items is not None
    assert items.operations.max(axis=0).tolist() == [1, 2, 2]


@pytest.mark.filterwarnings("error")
def test_a_parameter_without_elements_costs_no_bytes(
    model: ModelProfile, slow_network: Resources
) -> None:
    empty = replace(model.parameters[-1], name="empty", shape=(0, 4), ready_order=22)
    with_empty = replace(model, parameters=(*model.parameters, empty))
    strategies: list[dict[str, Value]] = [{}, {"large_exchange": "factors"}]
    seconds = CostModel(with_empty, slow_network).predict(strategies)
    assert seconds == pytest.approx(CostModel(model, slow_network).predict(strategies), rel=1e-3)


def test_an_alltoall_ends_on_the_slowest_host(model: ModelProfile, slow_network: Resources) -> None:
    """The rank that is alone on its host sends and receives 4/5 in turn, a ring 8/5 at once."""
    uneven = replace(slow_network, hosts=(Host("a", 4), Host("b", 1)))
    large = replace(model, parameters=model.parameters[1:2])
    cost = CostModel(large, uneven)
    ratio = wire_s(cost, {"large_exchange": "sharded"}) / wire_s(cost, {})
    assert ratio == pytest.approx(1.5, rel=0.01)


def test_gpus_without_nccl_send_as_processors_do(
    model: ModelProfile, slow_network: Resources
) -> None:
    large = replace(model, parameters=model.parameters[1:2])
    alone = replace(slow_network, hosts=(Host("a", 1), Host("b", 1)), device="NVIDIA H100")
    for nccl, expected in ((False, 1.5), (True, 1.0)):
        cost = CostModel(large, replace(alone, build=replace(alone.build, nccl=nccl)))
        ratio = wire_s(cost, {"large_exchange": "sharded"}) / wire_s(cost, {})
        assert ratio == pytest.approx(expected, rel=0.01)


def test_factors_that_cannot_be_gathered_travel_as_gradients(slow_network: Resources) -> None:
    def predict(factor_bytes: int) -> list[float]:
        layer = ParameterProfile(
            "l", (2**16, 2**16), "float32", False, 0, factor_bytes=factor_bytes
        )
        cost = CostModel(ModelProfile((layer,), 0.01, 0.02), slow_network)
        return cost.predict(
            [{"large_exchange": each} for each in ("factors", "allreduce")]
        ).tolist()

    most = (2**31 - 2**20) // slow_network.world_size
    factors, whole = predict(most - 1)
    assert factors < whole
    factors, whole = predict(most)
    assert factors == whole


def test_factors_pay_on_accelerators(slow_network: Resources) -> None:
    """The linear layers of VGG-16, batch 32, among eight hosts with an H100 each at 10 Gbit/s."""
    sides = {"fc6": (4096, 25088), "fc7": (4096, 4096), "fc8": (1000, 4096)}
    layers = [
        ParameterProfile(name, shape, "float32", ready_order=i, factor_bytes=32 * sum(shape) * 4)
        for i, (name, shape) in enumerate(sides.items())
    ]
    vgg = ModelProfile(tuple(layers), forward_s=0.03, backward_s=0.06)
    hosts = hypothetical_resources(slow_network, 8, 1, 10e9 / 8)
    gpus = replace(hosts, device="NVIDIA H100", build=replace(hosts.build, nccl=True))
    strategies: list[dict[str, Value]] = [
        {},
        {"large_exchange": "factors"},
        {"large_codec": "fp16"},
        {"large_codec": "int8"},
    ]
    plain, *others = CostModel(vgg, gpus).predict(strategies)
    assert max(others) < plain
    # Processors add the halves without NCCL.
    without = replace(gpus, build=hosts.build)
    fp16 = CostModel(vgg, without).prepare(Columns.of(strategies[2:3])).host_s
    assert fp16 == CostModel(vgg, hosts).prepare(Columns.of(strategies[2:3])).host_s


def test_factors_over_two_levels_leave_a_host_fewer_times(
    model: ModelProfile, slow_network: Resources
) -> None:
    """Of two hosts of two ranks, two messages leave a host, where a ring carries three."""
    table, matrix, *_ = model.parameters
    layer = replace(model, parameters=(replace(matrix, factor_bytes=1_000_000),))
    cost = CostModel(layer, slow_network)
    flat, levels = (
        wire_s(cost, {"large_exchange": each}) for each in ("factors", "hierarchical_factors")
    )
    assert levels / flat == pytest.approx(2 / 3, rel=0.01)
    # What is no product of factors travels as with the other.
    others = CostModel(replace(model, parameters=(table, matrix)), slow_network)
    plain = wire_s(others, {})
    assert wire_s(others, {"large_exchange": "hierarchical_factors"}) == plain


def _repeating(model: ModelProfile, coded: float, summed: float) -> ModelProfile:
    table, matrix, *small = model.parameters
    matrix = replace(matrix, coded_share=coded, summed_share=summed)
    return replace(model, parameters=(table, matrix, *small))


def test_lossless_codes_save_what_repeats(model: ModelProfile, slow_network: Resources) -> None:
    """Two ranks gather codes; more send those of parts, and of the parts' sums."""
    repeating, matrix = _repeating(model, 0.35, 0.85), 1024 * 1024 * 4
    coding_s = 5 * matrix * 2.5e-10
    strategies: list[dict[str, Value]] = [{}, {"large_lossless": True}]
    two = replace(
        slow_network,
        hosts=(Host("a", 1), Host("b", 1)),
        links=Links(Link(2, 1e-3, 12.5e6), None, Link(2, 1e-3, 12.5e6)),
    )
    plain, coded = CostModel(repeating, two).predict(strategies)
    assert plain - coded == pytest.approx(0.65 * matrix / 12.5e6 - coding_s, abs=0.02)
    plain, coded = CostModel(repeating, slow_network).predict(strategies)
    # An alltoall sends one byte for each from a host, an allgather 0.75; a ring sends 1.5.
    share = (0.35 * 1 + 0.85 * 0.75) / 1.5
    assert plain - coded == pytest.approx((1 - share) * matrix * 1.5 / 12.5e6 - coding_s, abs=0.02)
    levels: list[dict[str, Value]] = [
        {"large_exchange": "hierarchical"},
        {"large_exchange": "hierarchical", "large_lossless": True},
    ]
    plain, coded = CostModel(repeating, slow_network).predict(levels)
    # Sums of each host's ranks travel, and each rank codes half of them.
    assert plain - coded == pytest.approx(0.15 * matrix / 12.5e6 - coding_s / 2, abs=0.02)


def test_two_levels_have_the_latencies_of_their_links(
    model: ModelProfile, slow_network: Resources
) -> None:
    """In a large cluster an operation among all ranks takes much longer than one within a host."""
    links, strategies = slow_network.links, [{}, {"large_exchange": "hierarchical"}]
    assert links.overall is not None and links.within is not None and links.across is not None

    def predicted(share: float) -> tuple[float, float]:
        own = (replace(each, latency_s=0.03 * share) for each in (links.within, links.across))
        network = Links(replace(links.overall, latency_s=0.03), *own)
        flat, levels = CostModel(model, replace(slow_network, links=network)).predict(strategies)
        return float(flat), float(levels)

    flat, levels = predicted(1.0)
    same, shorter = predicted(0.1)
    assert same == flat and levels - shorter == pytest.approx(0.6 * 0.9 * 0.03 * 3)


def test_what_repeats_in_gradients_does_not_in_changes_of_parameters(
    model: ModelProfile, slow_network: Resources
) -> None:
    """Which rounds of local steps exchange."""
    rounds: list[dict[str, Value]] = [
        {"local_steps": 4},
        {"local_steps": 4, "large_lossless": True},
    ]
    plain, coded = CostModel(_repeating(model, 0.35, 0.85), slow_network).predict(rounds)
    assert coded == plain


def test_coded_factors_save_what_repeats(model: ModelProfile, slow_network: Resources) -> None:
    table, matrix, *small = model.parameters
    two = replace(
        slow_network,
        hosts=(Host("a", 1), Host("b", 1)),
        links=Links(Link(2, 1e-3, 12.5e6), None, Link(2, 1e-3, 12.5e6)),
    )
    strategies: list[dict[str, Value]] = [
        {"large_exchange": "factors"},
        {"large_exchange": "factors", "large_lossless": True},
    ]

    def saved_s(share: float) -> float:
        factors = replace(matrix, factor_bytes=1_000_000, coded_factors_share=share)
        cost = CostModel(replace(model, parameters=(table, factors, *small)), two)
        plain, coded = cost.predict(strategies)
        return float(plain - coded)

    coding_s = 3 * 40 * 1_000_000 * 2.5e-10
    assert saved_s(0.5) == pytest.approx(0.5 * 1_000_000 / 12.5e6 - coding_s, abs=0.001)
    assert saved_s(1.0) == 0


def test_what_travels_by_factors_is_not_coded_as_a_gradient(
    model: ModelProfile, slow_network: Resources
) -> None:
    """Whether bits of the gradient itself repeat makes no difference, among many ranks too."""
    strategy: dict[str, Value] = {"large_exchange": "factors", "large_lossless": True}

    def seconds(coded: float) -> float:
        table, matrix, *small = _repeating(model, coded, coded).parameters
        matrix = replace(matrix, factor_bytes=1_000_000, coded_factors_share=0.5)
        same = replace(model, parameters=(table, matrix, *small))
        return float(CostModel(same, slow_network).predict([strategy])[0])

    assert seconds(0.5) == seconds(1.0)


def test_coding_takes_what_it_took_in_the_job(model: ModelProfile, slow_network: Resources) -> None:
    table, matrix, *small = _repeating(model, 0.35, 0.85).parameters
    for chosen, share in (("allreduce", 1.0), ("hierarchical", 0.5)):
        strategy: dict[str, Value] = {"large_exchange": chosen, "large_lossless": True}
        once, thrice = (
            CostModel(
                replace(model, parameters=(table, replace(matrix, coding_s=coding_s), *small)),
                slow_network,
            ).predict([strategy])[0]
            for coding_s in (0.1, 0.3)
        )
        assert thrice - once == pytest.approx(0.2 * share, rel=0.01)


def test_lossless_codes_do_not_pay_on_fast_links_or_of_random_bits(
    model: ModelProfile, slow_network: Resources
) -> None:
    strategies: list[dict[str, Value]] = [{}, {"large_lossless": True}]
    fast = Link(2, 1e-4, 2e9)
    here = replace(slow_network, hosts=(Host("a", 2),), links=Links(fast, fast, None))
    plain, coded = CostModel(_repeating(model, 0.35, 0.85), here).predict(strategies)
    assert coded > plain
    plain, coded = CostModel(model, slow_network).predict(strategies)
    assert coded >= plain


def test_a_codec_goes_before_lossless_codes(model: ModelProfile, slow_network: Resources) -> None:
    strategies: list[dict[str, Value]] = [
        {"large_codec": "int8"},
        {"large_codec": "int8", "large_lossless": True},
        {"large_exchange": "sharded"},
        {"large_exchange": "sharded", "large_lossless": True},
    ]
    seconds = CostModel(_repeating(model, 0.35, 0.85), slow_network).predict(strategies)
    assert seconds[0] == seconds[1] and seconds[2] == seconds[3]


def test_ranks_of_a_host_encode_their_parts(model: ModelProfile, slow_network: Resources) -> None:
    """With ``hierarchical`` each of eight ranks encodes an eighth of the gradient."""
    hosts = tuple(Host(name, 8) for name in "abcd")
    cost = CostModel(model, hypothetical_resources(replace(slow_network, hosts=hosts), 4, 8))
    plans: list[dict[str, Value]] = [
        {"large_exchange": exchange, "large_codec": codec}
        for codec in ("none", "int8")
        for exchange in ("allreduce", "hierarchical")
    ]
    plain, levels, coded, levels_coded = cost.prepare(Columns.of(plans)).host_s
    assert levels_coded - levels == pytest.approx((coded - plain) / 8)


def test_each_slice_has_a_right_factor(model: ModelProfile, slow_network: Resources) -> None:
    cost = CostModel(model, slow_network)
    plain, element_s = wire_s(cost, {}), 4 * 1.5 / 12.5e6
    for slices in (1, 4):
        low_rank = {"large_codec": "powersgd", "large_rank": 16, "large_slices": slices}
        factors = 16 * (1024 + slices * 1024)
        saved = plain - wire_s(cost, low_rank)
        assert saved == pytest.approx((1024 * 1024 - factors) * element_s, rel=0.01)


def test_local_steps_share_one_exchange(model: ModelProfile, slow_network: Resources) -> None:
    strategies = [{"local_steps": steps} for steps in (1, 2, 4, 16)]
    seconds = CostModel(model, slow_network).predict([{}, *strategies])
    assert seconds[0] == seconds[1]
    wire_s = GRADIENT_BYTES * 1.5 / 12.5e6
    for time_s, steps in zip(seconds[2:], (2, 4, 16), strict=True):
        assert time_s == pytest.approx(0.032 + wire_s / steps, rel=0.1)
    # What is owned by one rank cannot be stepped by another.
    sharded = {"local_steps": 4, "large_exchange": "sharded", "embedding_exchange": "sharded"}
    assert CostModel(model, slow_network).predict([sharded])[0] == seconds[3]


def test_short_rounds_take_three_cycles(model: ModelProfile, slow_network: Resources) -> None:
    """One for the length, one for the end and one for the average; in long ones two are hidden."""
    only = replace(model, parameters=model.parameters[1:2])
    cost = CostModel(only, slow_network)

    def waits_s(cycle_ms: float, steps: int) -> float:
        """What the cycle adds to a round."""
        at = [
            {"local_steps": steps, "buckets": 1, "cycle_time_ms": each} for each in (1e-3, cycle_ms)
        ]
        shortest, seconds = cost.predict(at, Coefficients(contention=-99.0))
        return float(seconds - shortest) * steps

    step_s, average_s = 0.031, 1024 * 1024 * 4 * 1.5 / 12.5e6 + 0.002
    for steps in (2, 4, 16):
        # The beginning of one average to that of the next.
        assert waits_s(1000.0, steps) == pytest.approx(3.0 - steps * step_s - average_s, abs=2e-3)
        assert waits_s(10.0, steps) == pytest.approx(0.005, abs=1e-4)


def test_rounds_are_capped(model: ModelProfile, slow_network: Resources) -> None:
    at = [
        {},
        {"local_steps": 16, "local_cap": 1},
        {"local_steps": 4},
        {"local_steps": 16, "local_cap": 4},
    ]
    plain, capped, four, capped_four = CostModel(model, slow_network).predict(at)
    assert (plain, four) == (capped, capped_four)


@pytest.mark.parametrize(
    "apart",
    [
        {"local_steps": 4},
        {"local_power": 2},
        {"stragglers": "greedy"},
        {"protocol": "asp", "sync_share": 0.5, "total_samples": 1000},
    ],
)
def test_replicas_shard_nothing_and_put_nothing_off(
    model: ModelProfile, slow_network: Resources, apart: dict[str, Value]
) -> None:
    other = {"large_exchange": "sharded", "order": "priority", "fusion_threshold_bytes": 0}
    plain = {**apart, "fusion_threshold_bytes": 0}
    cost = CostModel(model, slow_network)
    assert cost.predict([plain]) == cost.predict([{**apart, **other}])
    assert cost.predict([{"fusion_threshold_bytes": 0}]) != cost.predict([other])
