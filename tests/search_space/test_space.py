"""The space of a task: which knobs it has, and points of the unit cube."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space import (
    Host,
    ModelProfile,
    ParameterProfile,
    Resources,
    SearchSpace,
    Strategy,
    Value,
    build_space,
)
from hvd_autosync.search_space.exchange_plan import parameter_classes
from hvd_autosync.search_space.knobs import CategoricalKnob, Condition, categorical_knob, float_knob


def names(space: SearchSpace) -> set[str]:
    return {knob.name for knob in space.knobs}


def test_one_cpu_host_has_no_knob_of_gpus_or_hierarchies(
    model: ModelProfile, one_host: Resources
) -> None:
    assert names(build_space(model, one_host)) == {
        "controller",
        "fusion_threshold_bytes",
        "cycle_time_ms",
        "cache_capacity",
        "buckets",
        "bucket_rule",
    }


def test_a_gpu_cluster_has_them(model: ModelProfile, gpu_cluster: Resources) -> None:
    found = names(build_space(model, gpu_cluster))
    assert {
        "hierarchical_allreduce",
        "torus_allreduce",
        "num_nccl_streams",
        "batch_d2d_memcopies",
    } <= found


def test_hierarchies_need_several_ranks_on_each_of_several_hosts(
    model: ModelProfile, gpu_cluster: Resources
) -> None:
    flat = replace(gpu_cluster, hosts=(Host("a", 1), Host("b", 1)))
    assert "hierarchical_allreduce" not in names(build_space(model, flat))


def test_without_mpi_horovod_has_a_torus_and_no_hierarchy(
    model: ModelProfile, gpu_cluster: Resources
) -> None:
    """``CreateOperationManager`` of its ``common/operations.cc``."""
    gloo = replace(gpu_cluster, build=replace(gpu_cluster.build, gloo=True, mpi=False))
    found = names(build_space(model, gloo))
    assert "torus_allreduce" in found and "hierarchical_allreduce" not in found
    both = replace(gpu_cluster, build=replace(gpu_cluster.build, gloo=True, mpi=True))
    space = build_space(model, both)
    under_gloo = {"controller": "gloo", "hierarchical_allreduce": True, "torus_allreduce": True}
    assert set(space.complete(under_gloo)).isdisjoint({"hierarchical_allreduce"})
    assert space.complete(under_gloo)["torus_allreduce"] is True


def test_hierarchical_allgather_needs_sparse_gradients_and_mpi(one_host: Resources) -> None:
    sparse = ModelProfile((ParameterProfile("e", (9, 9), "float32", True, 0),))
    two_levels = replace(one_host, hosts=(Host("a", 2), Host("b", 2)))
    with_mpi = build_space(sparse, two_levels, held={"controller": "mpi"})
    assert "hierarchical_allgather" in names(with_mpi)
    open_choice = build_space(sparse, two_levels)["hierarchical_allgather"]
    assert open_choice.condition == Condition("controller", ("mpi",))
    with_gloo = build_space(sparse, two_levels, held={"controller": "gloo"})
    assert "hierarchical_allgather" not in names(with_gloo)


def test_a_script_that_needs_launcher_keeps_its_controller(one_host: Resources) -> None:
    """Under the other one its world has other ranks."""
    script = ModelProfile((ParameterProfile("e", (9, 9), "float32", True, 0),), needs_launcher=True)
    two_levels = replace(one_host, hosts=(Host("a", 2), Host("b", 2)))
    spaces = {
        default: build_space(script, two_levels, default_controller=default)
        for default in ("gloo", "mpi")
    }
    assert all("controller" not in names(space) for space in spaces.values())
    assert "hierarchical_allgather" not in names(spaces["gloo"])
    assert spaces["mpi"]["hierarchical_allgather"].condition is None


def test_lossy_knobs_are_opt_in(model: ModelProfile, one_host: Resources) -> None:
    assert all(knob.exact for knob in build_space(model, one_host).knobs)
    assert "rest_codec" in names(build_space(model, one_host, allow=["codec"]))
    scheduled = build_space(model, one_host, allow=["schedule"])
    assert {knob.name for knob in scheduled.knobs if not knob.exact} == {"local_steps"}
    assert scheduled["local_steps"].default == 1
    unseen = replace(model, has_epochs=False)
    assert "local_steps" not in names(build_space(unseen, one_host, allow=["schedule"]))
    assert not scheduled.is_exact({"local_steps": 2})
    assert scheduled.is_exact({"local_steps": 1}) and scheduled.is_exact({"cycle_time_ms": 5.0})


def test_strategies_that_train_the_same_model_have_equal_parts(slow_network: Resources) -> None:
    matrix = ParameterProfile("matrix", (2048, 1024), "float32", False, 0)
    model = ModelProfile((matrix, ParameterProfile("bias", (8,), "float32", False, 1)))
    space = build_space(model, slow_network, allow=("codec", "schedule"))

    def same(first: dict[str, Value], second: dict[str, Value]) -> bool:
        return space.lossy_part(first) == space.lossy_part(second)

    assert same({"local_steps": 2, "buckets": 2}, {"local_steps": 2})
    assert not same({"local_steps": 2}, {"local_steps": 3})
    for codec in ("fp16", "bf16"):
        assert same({"large_codec": codec, "buckets": 2}, {"large_codec": codec})
    # The scales of int8, and what top-k and PowerSGD keep, depend on what else is in the bucket.
    for codec in ("int8", "topk", "powersgd"):
        assert not same({"large_codec": codec, "buckets": 2}, {"large_codec": codec})
        assert same({"large_codec": codec, "cycle_time_ms": 5.0}, {"large_codec": codec})
    held = build_space(
        model, slow_network, allow=("codec", "schedule"), held={"large_codec": "topk"}
    )
    assert held.lossy_part({"buckets": 2}) != held.lossy_part({})


def test_unknown_groups_are_refused(model: ModelProfile, one_host: Resources) -> None:
    with pytest.raises(SpaceError, match="'magic'") as caught:
        build_space(model, one_host, allow=["magic"])
    assert "codec" in caught.value.hint


def test_what_the_user_set_stays_fixed_and_conditions_see_it(
    model: ModelProfile, one_host: Resources
) -> None:
    space = build_space(model, one_host, held={"controller": "mpi", "cycle_time_ms": 3.5})
    assert {"controller", "cycle_time_ms"}.isdisjoint(names(space))
    assert dict(space.fixed) == {"controller": "mpi", "cycle_time_ms": 3.5}


def test_what_the_script_decides_is_not_touched(model: ModelProfile, one_host: Resources) -> None:
    space = build_space(model, one_host, owned=["buckets"], allow=["codec"])
    assert {"buckets", "bucket_rule"}.isdisjoint(names(space))


def test_buckets_hold_dense_gradients(one_host: Resources) -> None:
    parameters = [ParameterProfile(f"p{i}", (4,), "float32", False, i) for i in range(3)]
    rows = ParameterProfile("rows", (4, 4), "float32", True, 3)
    buckets = build_space(ModelProfile((*parameters, rows)), one_host)["buckets"]
    assert buckets.from_unit(1.0) == 3
    assert "buckets" not in names(build_space(ModelProfile((parameters[0], rows)), one_host))


def test_each_class_has_its_own_exchange(one_host: Resources) -> None:
    model = ModelProfile(
        (
            ParameterProfile("table", (100_000, 8), "float32", False, 2, touched_rows=0.01),
            ParameterProfile("tied", (100_000, 8), "float32", False, 1, touched_rows=1.0),
            ParameterProfile("bias", (8,), "float32", False, 0),
        )
    )
    assert parameter_classes(model) == {"embedding": ("table",), "large": ("tied",)}
    flat = build_space(model, one_host, allow=["codec"])
    choices = {knob.name: getattr(knob, "choices", ()) for knob in flat.knobs}
    assert choices["embedding_exchange"] == ("allreduce", "rows", "sharded")
    assert choices["large_exchange"] == ("allreduce", "sharded")
    assert "rest_exchange" not in names(flat)
    assert {"large_slices", "large_codec", "large_rank", "rest_codec"} <= names(flat)
    uneven = replace(one_host, hosts=(Host("a", 2), Host("b", 3)))
    assert "rest_exchange" not in names(build_space(model, uneven))
    two_levels = replace(one_host, hosts=(Host("a", 2), Host("b", 2)))
    assert {"large_exchange", "rest_exchange"} <= names(build_space(model, two_levels))


def test_factors_where_they_are_fewer_bytes_than_a_ring(one_host: Resources) -> None:
    def offered(resources: Resources, *factor_bytes: int) -> bool:
        layers = tuple(
            ParameterProfile(f"l{i}", (1024, 256), "float32", False, i, factor_bytes=count)
            for i, count in enumerate(factor_bytes)
        )
        knob = build_space(ModelProfile(layers), resources)["large_exchange"]
        assert isinstance(knob, CategoricalKnob)
        assert ("hierarchical_factors" in knob.choices) == (
            resources.even_levels and "factors" in knob.choices
        )
        return "factors" in knob.choices

    four = replace(one_host, hosts=(Host("a", 4),))
    two = replace(one_host, hosts=(Host("a", 2),))
    assert not offered(two, 0, 0)
    assert offered(two, 0, 1024 * 256 * 4 - 4)
    assert not offered(two, 0, 1024 * 256 * 4)
    assert not offered(four, 1024 * 256 * 4 - 4)
    assert offered(four, 1024 * 256 * 2 - 4)
    levels = replace(one_host, hosts=(Host("a", 2), Host("b", 2)))
    assert offered(levels, 1024 * 256 * 2 - 4) and not offered(levels, 1024 * 256 * 2)


def test_factors_that_cannot_be_gathered_are_not_offered(one_host: Resources) -> None:
    def choices(factor_bytes: int) -> tuple[Value, ...]:
        layer = ParameterProfile(
            "l", (2**16, 2**16), "float32", False, 0, factor_bytes=factor_bytes
        )
        knob = build_space(ModelProfile((layer,)), one_host)["large_exchange"]
        assert isinstance(knob, CategoricalKnob)
        return knob.choices

    assert one_host.world_size == 2
    assert "factors" in choices(2**30 - 2**19 - 1) and "factors" not in choices(2**30 - 2**19)


def test_lossless_codes_are_offered_where_bits_repeat(one_host: Resources) -> None:
    """In a class of 256 KiB or more, from the share of its bytes, to sums without a codec."""
    halves = ParameterProfile("m", (500, 300), "float32", False, 1, coded_share=0.35)
    bias = ParameterProfile("b", (8,), "float32", False, 0, coded_share=0.35)
    two = replace(one_host, hosts=(Host("a", 2),))

    def offered(resources: Resources, *parameters: ParameterProfile) -> set[str]:
        space = build_space(ModelProfile(parameters), resources)
        return {name for name in names(space) if name.endswith("lossless")}

    assert offered(two, halves, bias) == {"large_lossless"}
    assert offered(two, halves, replace(bias, shape=(80_000,))) == {
        "large_lossless",
        "rest_lossless",
    }
    assert offered(two, replace(halves, touched_rows=0.1)) == {"embedding_lossless"}
    assert not offered(two, replace(halves, coded_share=0.91))
    assert not offered(two, replace(halves, coded_share=1.0), bias)
    # Of several, so that the whole class has 0.96 of its bytes.
    assert not offered(two, halves, ParameterProfile("n", (4000, 600), "float32", False, 2))
    # Among more ranks, sums travel, too.
    four = replace(one_host, hosts=(Host("a", 4),))
    assert offered(four, replace(halves, summed_share=1.0))
    assert not offered(four, replace(halves, coded_share=0.85, summed_share=1.0))
    space = build_space(ModelProfile((halves, bias)), two)
    assert space["large_lossless"].exact and space.default["large_lossless"] is False
    assert "large_lossless" not in space.complete({"large_exchange": "sharded"})


def test_lossless_codes_beside_a_codec_are_no_other_strategy(one_host: Resources) -> None:
    layer = ParameterProfile(
        "l", (1024, 256), "float32", False, 1, coded_share=0.5, factor_bytes=100_000
    )
    bias = ParameterProfile("b", (80_000,), "float32", False, 0, coded_share=0.35)
    two = replace(one_host, hosts=(Host("a", 2),))
    space = build_space(ModelProfile((layer, bias)), two, allow=["codec"])
    for name in ("large", "rest"):
        coded: dict[str, Value] = {f"{name}_codec": "int8"}
        both = {**coded, f"{name}_lossless": True}
        assert space.complete(both) == space.complete(coded)
        assert space.lossy_part(both) == space.lossy_part(coded)
        assert f"{name}_lossless" not in space.decode(space.encode(both))
        uncoded: dict[str, Value] = {f"{name}_codec": "none", f"{name}_lossless": True}
        assert space.complete(uncoded)[f"{name}_lossless"] is True
    # Factors have no codec, whatever it is for other exchanges.
    factors: dict[str, Value] = {"large_exchange": "factors", "large_lossless": True}
    assert space.complete({**factors, "large_codec": "int8"}) == space.complete(factors)
    assert space.complete(factors)["large_lossless"] is True
    held = build_space(ModelProfile((layer, bias)), two, held={"large_codec": "int8"})
    assert "large_lossless" not in held.default and "rest_lossless" in held.default


def test_lossless_codes_are_offered_where_factors_repeat(one_host: Resources) -> None:
    two = replace(one_host, hosts=(Host("a", 2),))
    layer = ParameterProfile("l", (1024, 256), "float32", False, 1, factor_bytes=100_000)

    def space_of(share: float) -> SearchSpace:
        return build_space(ModelProfile((replace(layer, coded_factors_share=share),)), two)

    space = space_of(0.5)
    chosen = {"large_exchange": "factors", "large_lossless": True}
    assert space["large_lossless"].exact and chosen.items() <= space.complete(chosen).items()
    assert "large_lossless" not in names(space_of(0.91))
    # Factors that never travel: of too many rows, or of a class that has no such exchange.
    many = replace(layer, factor_bytes=1024 * 256 * 4, coded_factors_share=0.5)
    assert "large_lossless" not in names(build_space(ModelProfile((many,)), two))
    small = tuple(
        replace(layer, name=f"s{n}", shape=(128, 128), factor_bytes=9000, coded_factors_share=0.5)
        for n in range(8)
    )
    assert "rest_lossless" not in names(build_space(ModelProfile(small), two))


def test_bert_on_two_levels_has_at_most_twenty_dimensions(one_host: Resources) -> None:
    shapes = [("token", (30_000, 256)), ("position", (512, 256))]
    for layer in range(12):
        shapes += [
            (f"{layer}.{name}", shape)
            for name, shape in (
                ("qkv.weight", (768, 256)),
                ("qkv.bias", (768,)),
                ("norm.weight", (256,)),
            )
        ]
    parameters = [
        ParameterProfile(name, shape, "float32", False, order, touched_rows=1 - order % 2)
        for order, (name, shape) in enumerate(shapes)
    ]
    two_levels = replace(one_host, hosts=(Host("a", 2), Host("b", 2)))
    space = build_space(ModelProfile(tuple(parameters)), two_levels, allow=["codec"])
    assert {"embedding_exchange", "large_rank", "rest_codec"} <= names(space)
    assert space.dimension <= 20


@pytest.mark.parametrize("exchange", ["rows", "sharded"])
def test_codecs_do_not_matter_to_what_is_not_coded(one_host: Resources, exchange: str) -> None:
    table = ParameterProfile("t", (100_000, 8), "float32", False, 0, touched_rows=0.01)
    space = build_space(ModelProfile((table,)), one_host, allow=["codec"])
    uncoded = space.complete({"embedding_exchange": exchange})
    assert "embedding_codec" not in uncoded and "embedding_ratio" not in uncoded
    assert "embedding_codec" in space.default


def test_hand_reducing_scripts_have_no_optimizer_knobs(one_host: Resources) -> None:
    space = build_space(ModelProfile(wrapped=False), one_host, allow=["codec"])
    assert {"buckets", "rest_codec"}.isdisjoint(names(space))


def test_a_large_cache_matters_to_large_models_only(one_host: Resources) -> None:
    def choices(trained: int, frozen: int = 0) -> int:
        parameters = (ParameterProfile("p", (1,), "float32", False, 0),) * trained
        parameters += (ParameterProfile("f", (1,), "float32"),) * frozen
        return len(build_space(ModelProfile(parameters), one_host)["cache_capacity"].choices)

    assert (choices(100), choices(2000), choices(100, frozen=2000)) == (2, 3, 2)


def test_frozen_matrices_have_no_knobs(one_host: Resources) -> None:
    trained = ParameterProfile("bias", (8,), "float32", False, 0)
    model = ModelProfile((trained, ParameterProfile("frozen", (512, 512), "float32")))
    assert parameter_classes(model) == {"large": ("frozen",)}
    found = names(build_space(model, one_host, allow=["codec"]))
    assert not {name for name in found if name.startswith("large_")} and "rest_codec" in found


@given(data=st.data())
def test_decoding_is_stable_and_inactive_knobs_are_absent(data: st.DataObject) -> None:
    parent = categorical_knob("parent", ("a", "b"), "a", help="")
    child = float_knob("child", 0, 1, 0.5, help="", condition=Condition("parent", ("b",)))
    space = SearchSpace((parent, child))
    point = [data.draw(st.floats(0, 1)) for _ in range(2)]
    strategy = space.decode(point)
    assert ("child" in strategy) == (strategy["parent"] == "b")
    assert space.decode(space.encode(strategy)) == strategy


def test_inactive_coordinates_do_not_make_strategies_differ() -> None:
    parent = categorical_knob("parent", ("a", "b"), "a", help="")
    child = float_knob("child", 0, 1, 0.5, help="", condition=Condition("parent", ("b",)))
    space = SearchSpace((parent, child))
    assert space.decode([0.0, 0.1]) == space.decode([0.0, 0.9])


def test_children_must_follow_their_parents() -> None:
    child = float_knob("child", 0, 1, 0.5, help="", condition=Condition("parent", ("b",)))
    with pytest.raises(SpaceError, match="does not precede"):
        SearchSpace((child,))


def test_complete_fills_defaults_and_names_unknown_knobs(
    model: ModelProfile, one_host: Resources
) -> None:
    space = build_space(model, one_host)
    assert space.complete({}) == space.default
    with pytest.raises(SpaceError, match="'speed'"):
        space.complete({"speed": 1})
    with pytest.raises(SpaceError, match="cycle_time_ms"):
        space.complete({"cycle_time_ms": 1000.0})


def test_points_of_the_wrong_length_are_refused(model: ModelProfile, one_host: Resources) -> None:
    with pytest.raises(SpaceError, match="does not fit"):
        build_space(model, one_host).decode([0.5])


def test_describe_names_only_what_differs(model: ModelProfile, one_host: Resources) -> None:
    space = build_space(model, one_host)
    assert space.describe(space.default) == "default"
    changed = space.default.replacing(fusion_threshold_bytes=4 * 2**20)
    assert space.describe(changed) == "fusion_threshold_bytes=4 MiB"


def test_json_round_trip_and_key(model: ModelProfile, one_host: Resources) -> None:
    space = build_space(model, one_host, held={"cycle_time_ms": 2.0}, allow=["codec"])
    again = SearchSpace.from_json(json.loads(json.dumps(space.to_json())))
    assert again == space and again.key == space.key
    assert build_space(model, one_host).key != space.key
    reworded = replace(space, knobs=tuple(replace(k, help="?", unit="?") for k in space.knobs))
    assert reworded.key == space.key, "an earlier study of the job is still found"


def test_an_empty_space_has_one_strategy() -> None:
    assert SearchSpace(()).decode([]) == Strategy()
