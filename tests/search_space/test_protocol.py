"""Which protocol a training is under, by the samples it has seen."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.catalogue import CATALOGUE
from hvd_autosync.search_space.protocol import Protocol, push_count
from hvd_autosync.search_space.sync_plan import protocol_of


@pytest.mark.parametrize("share", [0.0, 0.05, 0.125, 0.5, 1.0])
@pytest.mark.parametrize("async_first", [False, True])
def test_the_share_of_samples_under_bsp_is_the_one_asked_for(
    share: float, async_first: bool
) -> None:
    protocol = Protocol(share=share, async_first=async_first, total=1000)
    under_bsp = [protocol.synchronous(samples) for samples in range(1000)]
    assert sum(under_bsp) == share * 1000
    assert sum(a != b for a, b in itertools.pairwise(under_bsp)) <= 1
    if 0 < share < 1:
        assert under_bsp[0] is not async_first


def test_without_a_known_total_ranks_wait_for_each_other() -> None:
    assert Protocol(share=0.5).synchronous(10**9)
    assert not Protocol(share=0.0).synchronous(0), "no share needs no total"


@given(st.integers(0, 500), st.integers(1, 64), st.integers(1, 200))
def test_a_ramped_momentum_rises_from_its_share_to_the_whole(
    steps: int, ranks: int, ramp: int
) -> None:
    factor = Protocol(momentum="ramped").momentum_factor(steps, ranks, ramp)
    assert 1 / ranks <= factor <= 1
    assert Protocol(momentum="ramped").momentum_factor(0, ranks, ramp) == pytest.approx(1 / ranks)
    assert Protocol(momentum="ramped").momentum_factor(ramp, ranks, ramp) == 1


@pytest.mark.parametrize(("mode", "factor"), [("kept", 1.0), ("zero", 0.0), ("scaled", 0.25)])
def test_other_modes_are_the_same_in_every_step(mode: str, factor: float) -> None:
    for steps in (0, 7, 1000):
        assert Protocol(momentum=mode).momentum_factor(steps, 4, 100) == factor


def test_a_strategy_without_these_knobs_has_no_protocol_of_its_own() -> None:
    assert protocol_of({"cycle_time_ms": 1.0}) is None
    assert protocol_of({"protocol": "bsp"}) is None
    assert protocol_of({"protocol": "asp", "sync_share": 1.0}) is None


def test_knobs_become_the_protocol_that_they_say() -> None:
    chosen = {"protocol": "ssp", "staleness": 3, "sync_share": 0.05, "switch_momentum": "zero"}
    assert protocol_of(chosen) == Protocol("ssp", 3, 0.05, momentum="zero")
    assert protocol_of({"stragglers": "elastic"}) == Protocol(share=1.0, stragglers="elastic")


def test_every_default_of_a_knob_is_that_of_the_protocol() -> None:
    knobs = [knob for knob in CATALOGUE if knob.group == "protocol"]
    defaults = {knob.name: knob.default for knob in knobs}
    assert protocol_of(defaults | {"protocol": "asp"}) == Protocol()


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "bsp"},
        {"staleness": -1},
        {"share": 1.5},
        {"rate": "half"},
        {"momentum": "lost"},
        {"stragglers": "shot"},
        {"total": -5},
    ],
)
def test_what_makes_no_sense_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpaceError, match=next(iter(wrong))):
        Protocol(**wrong)


@pytest.mark.parametrize(("size_bytes", "count"), [(10, 1), (400_000, 6), (2**23, 8), (2**28, 64)])
def test_buckets_are_neither_tiny_nor_huge(size_bytes: int, count: int) -> None:
    assert push_count(size_bytes) == count
