"""The one mapping onto Horovod, in both directions."""

import pytest

from hvd_autosync.errors import ConfigurationError, SpaceError
from hvd_autosync.search_space import CATALOGUE, Strategy, held_by_environment, horovod_settings
from hvd_autosync.search_space.horovod_settings import (
    changeable_variables,
    kept_by_horovod,
    launched_by_mpi,
)


def test_defaults_set_no_variable() -> None:
    default = Strategy({k.name: k.default for k in CATALOGUE if k.name != "controller"})
    settings = horovod_settings(default)
    assert (settings.environment, settings.options) == ((), ())


def test_every_knob_of_horovods_has_a_meaning() -> None:
    for knob in CATALOGUE:
        if knob.group != "horovod":
            continue
        other = next(
            value for value in (knob.from_unit(u) for u in (0.0, 0.3, 1.0)) if value != knob.default
        )
        settings = horovod_settings({knob.name: other})
        assert settings.environment or settings.options, knob.name


@pytest.mark.parametrize(
    ("strategy", "variable", "text"),
    [
        ({"fusion_threshold_bytes": 0}, "HOROVOD_FUSION_THRESHOLD", "0"),
        ({"cycle_time_ms": 0.25}, "HOROVOD_CYCLE_TIME", "0.25"),
        ({"cache_capacity": 0}, "HOROVOD_CACHE_CAPACITY", "0"),
        ({"hierarchical_allreduce": True}, "HOROVOD_HIERARCHICAL_ALLREDUCE", "1"),
        ({"batch_d2d_memcopies": False}, "HOROVOD_BATCH_D2D_MEMCOPIES", "0"),
    ],
)
def test_environment(strategy: dict[str, object], variable: str, text: str) -> None:
    settings = horovod_settings(strategy)  # type: ignore[arg-type]
    assert dict(settings.environment) == {variable: text}
    assert held_by_environment({variable: text}) == strategy


def test_options() -> None:
    assert horovod_settings({"controller": "mpi", "buckets": 4}).options == ("--mpi",)
    assert horovod_settings({"controller": "gloo"}).options == ("--gloo",)


def test_exchanges_of_two_levels_need_process_sets() -> None:
    settings = horovod_settings({"rest_exchange": "hierarchical"})
    assert dict(settings.environment) == {"HOROVOD_DYNAMIC_PROCESS_SETS": "2"}


def test_unknown_knobs_are_refused() -> None:
    with pytest.raises(SpaceError, match="'speed'"):
        horovod_settings({"speed": 11})


@pytest.mark.parametrize(
    ("variable", "text"), [("HOROVOD_CYCLE_TIME", "fast"), ("HOROVOD_CACHE_CAPACITY", "large")]
)
def test_misread_variables_are_named(variable: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=variable):
        held_by_environment({variable: text})


def test_values_outside_our_domain_are_held_all_the_same() -> None:
    assert held_by_environment({"HOROVOD_CYCLE_TIME": "500"}) == {"cycle_time_ms": 500.0}


def test_a_library_chosen_by_variable_is_held() -> None:
    assert held_by_environment({"HOROVOD_CPU_OPERATIONS": "MPI"}) == {"controller": "mpi"}


def test_which_launcher_has_started_a_rank() -> None:
    assert launched_by_mpi({"OMPI_COMM_WORLD_RANK": "0", "HOROVOD_CONTROLLER": "mpi"})
    assert not launched_by_mpi({"HOROVOD_RANK": "0", "PMIX_RANK": "0"})
    assert not launched_by_mpi({"HOME": "/"})


def test_what_horovod_reads_again_and_what_it_keeps() -> None:
    assert kept_by_horovod() == {
        "HOROVOD_FUSION_THRESHOLD": str(128 * 2**20),
        "HOROVOD_CYCLE_TIME": "1.0",
        "HOROVOD_CACHE_CAPACITY": "1024",
        "HOROVOD_NUM_NCCL_STREAMS": "1",
    }
    flags = {"HIERARCHICAL_ALLREDUCE", "TORUS_ALLREDUCE", "HIERARCHICAL_ALLGATHER"}
    assert {*changeable_variables()} == {*kept_by_horovod()} | {f"HOROVOD_{flag}" for flag in flags}
