"""The user's space file."""

from typing import Any

import pytest

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space import (
    ModelProfile,
    ParameterProfile,
    Resources,
    SearchSpace,
    Strategy,
    build_space,
    catalogue_knob,
    check_restrictions,
    restrict_space,
)
from hvd_autosync.search_space.knobs import LOSSY_GROUPS, CategoricalKnob
from hvd_autosync.search_space.restrictions import check_allowed, left_empty


def test_bounds_choices_and_fixed_values(model: ModelProfile, one_host: Resources) -> None:
    document = {
        "knobs": {
            "cycle_time_ms": {"low": 2, "high": 10},
            "controller": {"choices": ["mpi"]},
            "fusion_threshold_bytes": {"fixed": 67108864},
        }
    }
    space = restrict_space(build_space(model, one_host), document)
    assert space["cycle_time_ms"].from_unit(0.0) == 2
    for position in (0.0, 0.5, 1.0):
        strategy = space.decode([position] * space.dimension)
        assert strategy["fusion_threshold_bytes"] == 67108864
        assert strategy["controller"] == "mpi"


def test_a_space_knows_whether_the_job_as_it_is_lies_in_it(
    model: ModelProfile, one_host: Resources
) -> None:
    space = build_space(model, one_host)
    kept = restrict_space(space, {"knobs": {"cycle_time_ms": {"high": 10}}})
    moved = restrict_space(space, {"knobs": {"cycle_time_ms": {"low": 5}}})
    assert kept.holds_job and kept.complete(Strategy()) == kept.default
    assert not moved.holds_job and moved.complete(Strategy()) == Strategy()
    assert moved.default["cycle_time_ms"] == 5
    assert SearchSpace.from_json(moved.to_json()) == moved
    assert kept.describe(kept.default) == kept.describe({}) == "default"
    assert moved.describe({}) == "the unchanged job"
    assert moved.describe(moved.default) == "the restricted default"
    assert moved.describe({**moved.default, "cycle_time_ms": 6.0}) == "cycle_time_ms=6 ms"


@pytest.mark.parametrize(
    ("name", "table", "on"),
    [
        ("bucket_rule", {"fixed": "size"}, ("buckets", {"fixed": 4})),
        ("large_rank", {"low": 4}, ("large_codec", {"fixed": "powersgd"})),
        ("large_ratio", {"low": 0.05}, ("large_codec", {"choices": ["topk"]})),
    ],
)
def test_the_job_lies_where_only_knobs_are_moved_that_its_default_switches_off(
    name: str, table: dict[str, Any], on: tuple[str, dict[str, Any]], one_host: Resources
) -> None:
    layers = [ParameterProfile(f"{i}.weight", (512, 512), "float32", False, i) for i in range(8)]
    space = build_space(ModelProfile(tuple(layers)), one_host, allow=("codec",))
    document = {"knobs": {name: table}}
    kept = restrict_space(space, document)
    assert kept.holds_job and kept.complete(Strategy()) == kept.default == space.default
    assert kept[name].default != space[name].default
    check_allowed(document, ())  # it changes nothing without the codec
    moved = {"knobs": {name: table, on[0]: on[1]}}
    assert not restrict_space(space, moved).holds_job
    if not catalogue_knob(name).exact:
        with pytest.raises(SpaceError, match=rf"the default of {name}, {on[0]},"):
            check_allowed(moved, ())


def test_knobs_that_cannot_matter_here_are_ignored(
    model: ModelProfile, one_host: Resources
) -> None:
    space = build_space(model, one_host)
    assert restrict_space(space, {"knobs": {"num_nccl_streams": {"fixed": 2}}}) == space


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"knob": {}}, "knob"),
        ({"knobs": {"speed": {"fixed": 1}}}, "'speed'"),
        ({"knobs": {"cycle_time_ms": {"lowest": 1}}}, "'lowest'"),
        ({"knobs": {"cycle_time_ms": 5}}, "not a table"),
        ({"knobs": {"cycle_time_ms": {"low": "one"}}}, "'one'"),
        ({"knobs": {"cycle_time_ms": {"low": 10**400}}}, "not a number"),
        ({"knobs": {"cycle_time_ms": {"fixed": [1]}}}, "not a number"),
        ({"knobs": {"cycle_time_ms": {"low": 500}}}, "leave nothing"),
        ({"knobs": {"cycle_time_ms": {"low": 5, "high": 2}}}, "leave nothing"),
        ({"knobs": {"cycle_time_ms": {"fixed": 1000}}}, "out of bounds"),
        ({"knobs": {"controller": {"choices": []}}}, "no choice"),
        ({"knobs": {"controller": {"choices": ["smoke"]}}}, "'smoke'"),
        ({"knobs": {"controller": {"choices": "mpi"}}}, "not a list"),
        ({"knobs": {"cycle_time_ms": {"fixed": 5, "low": 2}}}, "fixed excludes low"),
        ({"knobs": 3}, "not a table"),
    ],
)
def test_what_cannot_be_is_named(document: dict[str, Any], named: str) -> None:
    with pytest.raises(SpaceError, match=named):
        check_restrictions(document)


def test_lossy_values_need_their_group() -> None:
    lossy = {
        "knobs": {
            "large_codec": {"fixed": "int8"},
            "local_steps": {"low": 2},
            "rest_codec": {"choices": ["none", "fp16"]},
            "cycle_time_ms": {"fixed": 5},
        }
    }
    check_allowed(lossy, ("codec", "schedule"))
    check_allowed({"knobs": {"large_codec": {"fixed": "none"}}}, ())
    with pytest.raises(SpaceError, match="the default of large_codec, local_steps,") as caught:
        check_allowed(lossy, ())
    assert "--autosync-allow codec,schedule" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("local_power", {"fixed": 2}),
        ("protocol", {"choices": ["asp", "ssp"]}),
        ("local_start", {"low": 100}),
    ],
)
def test_knobs_that_no_trial_changes_keep_their_defaults(name: str, table: dict[str, Any]) -> None:
    with pytest.raises(SpaceError, match=f"of {name}, which no trial changes") as caught:
        check_allowed({"knobs": {name: table}}, LOSSY_GROUPS)
    assert "--autosync-strategy FILE" in caught.value.hint
    check_allowed({"knobs": {name: {"fixed": catalogue_knob(name).default}}}, ())


def test_a_choice_that_this_job_lacks_is_no_restriction(
    model: ModelProfile, one_host: Resources
) -> None:
    def choices(*wanted: int) -> object:
        tables = {"cache_capacity": {"choices": list(wanted)}}
        return restrict_space(build_space(model, one_host), {"knobs": tables})["cache_capacity"]

    found = choices(1024, 4096)
    assert isinstance(found, CategoricalKnob) and found.choices == (1024,)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("cache_capacity", {"choices": [4096]}),
        ("cache_capacity", {"fixed": 4096}),
        ("buckets", {"low": 60}),
        ("buckets", {"fixed": 64}),
    ],
)
def test_a_knob_of_which_nothing_is_left_here_stays_as_it_is(
    name: str, table: dict[str, Any], model: ModelProfile, one_host: Resources
) -> None:
    document = {"knobs": {name: table}}
    check_restrictions(document)
    space = build_space(model, one_host)
    restricted = restrict_space(space, document)
    assert left_empty(space, document) == [name]
    assert {restricted.decode([u] * restricted.dimension).get(name) for u in (0.0, 0.9)} <= {
        space[name].default,
        None,
    }
    assert restricted.holds_job
