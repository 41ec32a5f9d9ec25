"""The knobs below Horovod: present where they are honoured, absent elsewhere, never the user's."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from hvd_autosync.search_space import (
    Host,
    ModelProfile,
    Resources,
    Strategy,
    Value,
    build_space,
    catalogue_knob,
    held_by_environment,
    horovod_settings,
)
from hvd_autosync.search_space.families.transport import MOST_SOCKETS, TRANSPORT
from hvd_autosync.search_space.horovod_settings import without_held

ON_GPUS = {spec.name for spec in TRANSPORT.specs} - {"threads_per_rank"}
SOCKETS = {"nccl_socket_threads", "nccl_sockets_per_thread"}


@pytest.fixture
def gpus(slow_network: Resources) -> Resources:
    """Two hosts of two GPUs, with a Horovod that was built with NCCL."""
    build = replace(slow_network.build, nccl=True)
    return replace(slow_network, device="NVIDIA H100", build=build)


def found(model: ModelProfile, resources: Resources, **options: object) -> set[str]:
    space = build_space(model, resources, **options)  # type: ignore[arg-type]
    return {knob.name for knob in space.knobs if knob.group == "transport"}


def test_nccls_knobs_need_gpus_that_nccl_serves(
    model: ModelProfile, gpus: Resources, slow_network: Resources
) -> None:
    assert found(model, gpus) == ON_GPUS
    assert found(model, replace(gpus, build=slow_network.build)) == set()
    assert found(model, replace(gpus, device="cpu")) == set()
    assert found(model, replace(gpus, hosts=(Host("a", 4),))) == ON_GPUS - SOCKETS
    assert found(model, replace(gpus, hosts=(Host("a", 1),))) == set()
    assert all(spec.knob.exact for spec in TRANSPORT.specs)


def test_threads_need_more_cores_than_ranks(
    model: ModelProfile, gpus: Resources, slow_network: Resources
) -> None:
    assert found(model, replace(slow_network, cores=1)) == set()
    space = build_space(model, replace(slow_network, cores=6))
    knob = space["threads_per_rank"]
    assert (knob.from_unit(0.0), knob.from_unit(1.0), knob.default) == (0, 6, 0)
    assert "threads_per_rank" not in found(model, replace(gpus, cores=6))
    assert found(model, replace(slow_network, cores=6), owned=("threads_per_rank",)) == set()


def test_defaults_set_nothing_and_other_values_their_variable() -> None:
    default = {spec.name: spec.knob.default for spec in TRANSPORT.specs}
    assert horovod_settings(default).environment == ()
    chosen = Strategy(
        {
            "nccl_algorithm": "tree",
            "nccl_protocol": "ll",
            "nccl_min_channels": 2,
            "nccl_max_channels": 8,
            "nccl_buffer_bytes": 8 * 2**20,
            "nccl_threads": 256,
            "nccl_socket_threads": 4,
            "nccl_sockets_per_thread": 2,
            "threads_per_rank": 3,
        }
    )
    assert dict(horovod_settings(chosen).environment) == {
        "NCCL_ALGO": "tree",
        "NCCL_PROTO": "ll",
        "NCCL_MIN_NCHANNELS": "2",
        "NCCL_MAX_NCHANNELS": "8",
        "NCCL_BUFFSIZE": "8388608",
        "NCCL_NTHREADS": "256",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "2",
        "OMP_NUM_THREADS": "3",
    }
    assert held_by_environment(dict(horovod_settings(chosen).environment)) == dict(chosen)
    assert catalogue_knob("nccl_buffer_bytes").format(8 * 2**20) == "8 MiB"


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("NCCL_ALGO", "Ring", "nccl_algorithm", "ring"),
        ("NCCL_ALGO", "^Tree", "nccl_algorithm", "^Tree"),
        ("NCCL_PROTO", "LL128", "nccl_protocol", "LL128"),
        ("NCCL_MIN_NCHANNELS", "64", "nccl_min_channels", 64),
        ("NCCL_BUFFSIZE", "1000", "nccl_buffer_bytes", 1000),
        ("NCCL_NSOCKS_PERTHREAD", "many", "nccl_sockets_per_thread", "many"),
    ],
)
def test_what_the_user_has_set_is_held_whatever_it_is(
    model: ModelProfile, gpus: Resources, variable: str, text: str, name: str, value: Value
) -> None:
    held = held_by_environment({variable: text})
    assert held == {name: value}
    space = build_space(model, gpus, held=held)
    assert name not in {knob.name for knob in space.knobs}
    assert dict(space.fixed) == {name: value}
    assert catalogue_knob(name).format(value)


def test_variables_for_all_jobs_of_a_cluster_do_not_change_other_spaces(
    model: ModelProfile, slow_network: Resources
) -> None:
    held = held_by_environment({"OMP_NUM_THREADS": "4,2", "NCCL_ALGO": "Tree", "NCCL_PROTO": " "})
    assert held == {"threads_per_rank": "4,2", "nccl_algorithm": "tree"}
    assert build_space(model, slow_network, held=held).key == build_space(model, slow_network).key


def test_a_strategy_does_not_overrule_the_user() -> None:
    settings = {"NCCL_ALGO": "tree", "NCCL_PROTO": "ll", "HOROVOD_CYCLE_TIME": "2.0"}
    user = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "", "HOROVOD_CYCLE_TIME": "5"}
    assert without_held(settings, user) == {"NCCL_PROTO": "ll", "HOROVOD_CYCLE_TIME": "2.0"}


@pytest.mark.parametrize("held", [None, 1, 8, 12, 16, 64])
def test_there_are_at_most_64_sockets(
    model: ModelProfile, gpus: Resources, held: int | None
) -> None:
    given = {} if held is None else {"nccl_socket_threads": held}
    space = build_space(model, gpus, held=given)
    sockets = space["nccl_sockets_per_thread"].from_unit(1.0)
    threads = space["nccl_socket_threads"].from_unit(1.0) if held is None else held
    assert isinstance(sockets, int) and isinstance(threads, int)
    assert threads * max(sockets, 1) <= MOST_SOCKETS
    # NCCL's own choice of the unset one is at most 8.
    assert held is not None or all(each * 8 <= MOST_SOCKETS for each in (sockets, threads))


def test_every_strategy_of_the_family_is_a_valid_setting(
    model: ModelProfile, gpus: Resources
) -> None:
    space = build_space(model, gpus)
    for corner in itertools.product((0.0, 1.0), repeat=2):
        strategy = space.decode([corner[i % 2] for i in range(space.dimension)])
        for name, text in horovod_settings(strategy).environment:
            assert not name.startswith("NCCL_") or (text.isalnum() and text != "0"), name
