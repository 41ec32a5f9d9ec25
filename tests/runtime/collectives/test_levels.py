"""Process sets that ``hvd.init()`` makes, where ranks know their places before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
from horovod.torch import mpi_ops

from hvd_autosync.runtime.collectives import levels, shared_sets
from hvd_autosync.search_space.horovod_settings import OURS_ALONE, PROCESS_SETS_VARIABLE
from hvd_autosync.util import patches

#: Rank 3 of two hosts with two slots each.
PLACE = {"RANK": 3, "SIZE": 4, "LOCAL_RANK": 1, "LOCAL_SIZE": 2, "CROSS_RANK": 1, "CROSS_SIZE": 2}


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``init(place, *arguments)``: the process sets with which Horovod's is called then."""

    def run(place: dict[str, int], *arguments: Any, variable: str = OURS_ALONE) -> Any:
        for name in PLACE:
            monkeypatch.delenv(f"HOROVOD_{name}", raising=False)
        for name, value in place.items():
            monkeypatch.setenv(f"HOROVOD_{name}", str(value))
        monkeypatch.setenv(PROCESS_SETS_VARIABLE, variable)
        monkeypatch.setattr(levels, "_MADE", {})
        called = []

        def horovods(comm: Any = None, process_sets: Any = None) -> None:
            dynamic = PROCESS_SETS_VARIABLE in levels.os.environ
            called.append((comm, process_sets, dynamic))

        for owner in (hvd, mpi_ops):
            monkeypatch.setattr(owner, "init", horovods)
        levels.prepare_levels()
        hvd.init(*arguments)
        assert patches.uninstall("process sets")
        comm, sets, dynamic = called[0]
        assert levels.os.environ[PROCESS_SETS_VARIABLE] == variable
        assert comm is (arguments[0] if arguments else None)
        return sets if dynamic else [each.ranks for each in sets]

    return run


def test_sets_of_both_levels_are_made(init: Any) -> None:
    assert init(PLACE) == [[0, 1], [2, 3], [0, 2], [1, 3]]


def test_sets_of_three_hosts(init: Any) -> None:
    place = {**PLACE, "SIZE": 6, "CROSS_SIZE": 3}
    assert init(place) == [[0, 1], [2, 3], [4, 5], [0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    "place",
    [
        {},
        {**PLACE, "SIZE": 5},
        {**PLACE, "RANK": 2},
        {"RANK": 1, "SIZE": 2, "LOCAL_RANK": 1, "LOCAL_SIZE": 2, "CROSS_RANK": 0, "CROSS_SIZE": 1},
    ],
    ids=["MPI", "unequal hosts", "another order", "one host"],
)
def test_elsewhere_they_are_added_later(init: Any, place: dict[str, int]) -> None:
    assert init(place) is None


@pytest.mark.parametrize("arguments", [([0, 1],), (None, "dynamic")])
def test_who_asks_for_something_else_gets_that(init: Any, arguments: tuple[Any, ...]) -> None:
    assert init(PLACE, *arguments) == (arguments[1] if len(arguments) > 1 else None)


def test_a_script_that_adds_process_sets_still_can(init: Any) -> None:
    assert init(PLACE, variable="1") is None


def test_who_has_called_init_before_may_do_it_again(
    init: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi_ops, "is_initialized", lambda: True)
    assert init(PLACE) is None


@pytest.mark.parametrize(("exchange", "sets"), [("hierarchical", 4), ("allreduce", 0)])
def test_workers_make_them_where_their_strategy_has_two_levels(
    run_python: Callable[[str], str], exchange: str, sets: int
) -> None:
    code = f"""
import os
os.environ |= {{f"HOROVOD_{{name}}": str(value) for name, value in {PLACE}.items()}}
os.environ[{PROCESS_SETS_VARIABLE!r}] = {OURS_ALONE!r}
import horovod.torch as hvd
from hvd_autosync.runtime.install.activation import activate
from hvd_autosync.search_space import Strategy, TrialSpec
hvd.init = hvd.mpi_ops.init = lambda comm=None, process_sets=None: print(len(process_sets or ()))
strategy = Strategy({{"rest_exchange": {exchange!r}, "buckets": 2}})
activate(TrialSpec("t", strategy, warmup_steps=0, measured_steps=0))
hvd.init()
"""
    assert run_python(code).strip() == str(sets)


def test_another_init_gives_the_same_sets_new_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges that have them continue."""
    monkeypatch.setenv(PROCESS_SETS_VARIABLE, OURS_ALONE)
    monkeypatch.setattr(levels, "_MADE", {})
    called: list[Any] = []
    places = [divmod(each, 2) for each in range(4)]
    init = levels._with_levels(lambda comm, sets: called.append(sets), places)
    init()
    init()
    first, second = called
    assert [each.ranks for each in first] == [[0, 1], [2, 3], [0, 2], [1, 3]]
    assert all(own is same for own, same in zip(first, second, strict=True))


@pytest.mark.parametrize("by_init", [True, False], ids=["made by init()", "added"])
def test_sets_that_horovod_does_not_have_any_more_are_made_again(
    by_init: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script has initialized it again, with a process set of its own."""
    registered: dict[int, list[int]] = {}
    places = [divmod(each, 2) for each in range(4)]

    def add(ranks: list[int]) -> hvd.ProcessSet:
        own = hvd.ProcessSet(ranks)
        own.process_set_id = len(registered) + 1
        registered[own.process_set_id] = own.ranks
        return own

    members = levels._members(places) if by_init else {}
    monkeypatch.setattr(levels, "_MADE", {key: add(ranks) for key, ranks in members.items()})
    monkeypatch.setattr(levels, "hosts_and_slots", lambda: places)
    monkeypatch.setattr(levels, "add_process_set", add)
    monkeypatch.setattr(levels, "registered_process_sets", lambda: registered)
    monkeypatch.setattr(levels, "is_homogeneous", lambda: True)
    for name, value in {"local_rank": 0, "local_size": 2, "cross_rank": 1, "cross_size": 2}.items():
        monkeypatch.setattr(levels, name, lambda value=value: value)
    known = levels._Known()
    monkeypatch.setattr(levels, "_known", lambda: known)

    first = levels.two_levels()
    assert len(registered) == 4 and levels.two_levels() is first
    registered.clear()
    add([0, 3])
    second = levels.two_levels()
    assert len(registered) == 5 and levels.two_levels() is second is not first
    for own, ranks in ((second.within, [2, 3]), (second.across, [0, 2])):
        assert registered[own.process_set_id] == ranks


def test_a_set_that_the_script_adds_first_under_another_horovod_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have the number of ours under the one before."""
    ours = hvd.ProcessSet([0, 1])
    ours.process_set_id = 1
    monkeypatch.setattr(shared_sets, "_OURS", {(0, 1): ours})
    assert shared_sets._adding(lambda ranks: 1)([0, 1]) == 1
    assert shared_sets._OURS == {}
