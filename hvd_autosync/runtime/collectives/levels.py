"""Process sets for two-level exchanges: the ranks of a host, and one rank of each host."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet as HorovodProcessSet
from horovod.torch import mpi_ops

from hvd_autosync.errors import SpaceError
from hvd_autosync.runtime.collectives.addresses import is_reached_by_name
from hvd_autosync.runtime.collectives.agreement import agree_any
from hvd_autosync.runtime.collectives.initialization import (
    last_initialization,
    registered_process_sets,
)
from hvd_autosync.runtime.collectives.operations import (
    ProcessSet,
    add_process_set,
    allgather,
    cross_rank,
    cross_size,
    is_homogeneous,
    local_rank,
    local_size,
    once_per_rank,
    size,
)
from hvd_autosync.search_space.horovod_settings import (
    OURS_ALONE,
    PLACE_VARIABLES,
    PROCESS_SETS_VARIABLE,
)
from hvd_autosync.util import patches

#: Level of a set, and its host or its slot on every host.
_Key = tuple[str, int]
#: The sets that the last ``hvd.init()`` that could has created.
_MADE: dict[_Key, HorovodProcessSet] = {}


@dataclass(frozen=True)
class Levels:
    """The two process sets of this rank.

    Attributes:
        within: The ranks of this host.
        across: The ranks of all hosts that have this rank's slot.
    """

    within: ProcessSet
    across: ProcessSet


@dataclass
class _Known:
    """What one rank has made.

    Attributes:
        levels: Its levels; ``None`` before they are made.
        sets: The sets of all ranks' levels.
    """

    levels: Levels | None = None
    sets: Mapping[_Key, ProcessSet] = field(default_factory=dict)


def prepare_levels() -> None:
    """Let ``hvd.init()`` create the process sets, if the launcher gave this rank its host and slot.

    Process sets that may be added later delay every operation: Horovod's loop locks their table
    while it negotiates (``RunLoopOnce`` in ``operations.cc``). If hosts and slots are not known
    before, as under MPI, or if the script has process sets of its own, :func:`two_levels` adds them
    nevertheless. If hosts have different numbers of ranks, some of them may take the job for one of
    two levels: do not use a two-level strategy on such hosts.
    """
    places = _places_from_environment(os.environ)
    if places is not None:
        patches.install("process sets", lambda init: _with_levels(init, places))


def _with_levels(init: Callable[..., Any], places: list[tuple[int, int]]) -> Callable[..., Any]:
    @functools.wraps(init)
    def with_levels(comm: Any = None, process_sets: Any = None) -> Any:
        own = comm is not None or process_sets is not None
        if own or os.environ.get(PROCESS_SETS_VARIABLE) != OURS_ALONE or mpi_ops.is_initialized():
            return init(comm, process_sets)
        # The same objects again: exchanges that have them continue under a new Horovod.
        sets = {
            key: _MADE.get(key) or HorovodProcessSet(ranks)
            for key, ranks in _members(places).items()
        }
        del os.environ[PROCESS_SETS_VARIABLE]
        try:
            result = init(None, list(sets.values()))
        finally:
            os.environ[PROCESS_SETS_VARIABLE] = OURS_ALONE  # for processes that this one starts
        _MADE.update(sets)
        return result

    return with_levels


def can_add_levels() -> bool:
    """Return whether Horovod may have the sets of two levels after it is initialized again.

    A collective. The next start of the job has to have them from ``init()`` on, too
    (:func:`prepare_levels`). A script that has process sets, or may add some, keeps them to itself:
    Horovod has at most one of the same ranks. Where a host's own name leads to a loopback address,
    or to none, its ranks could not connect, and would end.
    """
    last = last_initialization()
    plain = last is not None and last.comm is None and (last.dynamic or "0") == "0"
    known = _places_from_environment(os.environ) is not None
    possible = plain and known and not _others()
    (missing,) = agree_any([not (is_reached_by_name("levels") and possible)], "levels.possible")
    return not missing


def levels_to_add() -> list[HorovodProcessSet]:
    """Return the sets of two levels, which this job does not have yet; a collective.

    They are for a Horovod that is initialized again: :func:`two_levels` finds them there.

    Raises:
        SpaceError: The job cannot have them (:func:`can_add_levels`), or has not two levels.
    """
    check_levels("hierarchical")
    if not can_add_levels():
        raise SpaceError(
            "this job's process sets for the exchange 'hierarchical' cannot come from hvd.init(), "
            "the script has some of its own, or a host's own name leads to no network interface",
            hint="Tune with --autosync-mode launched.",
        )
    for key, ranks in _members(hosts_and_slots()).items():
        _MADE.setdefault(key, HorovodProcessSet(ranks))
    return [*_MADE.values()]


def made_levels() -> list[HorovodProcessSet]:
    """Return the sets of two levels that Horovod has from its ``init()``."""
    registered = registered_process_sets() if _MADE else {}
    return [e for e in _MADE.values() if registered.get(_number(e)) == e.ranks]


def _others() -> list[int]:
    """Return the numbers of process sets that are none of these."""
    own = {_number(each) for each in made_levels()}
    return [number for number in registered_process_sets() if number not in own]


def _number(members: HorovodProcessSet) -> int:
    """Return the number of a set; -1 if Horovod does not have it."""
    return -1 if members.process_set_id is None else int(members.process_set_id)


@once_per_rank
def _known() -> _Known:
    """Return what this rank has made so far."""
    return _Known()


def two_levels() -> Levels:
    """Return the job's levels, the same ones as long as Horovod has their process sets.

    The first call is a collective, unless ``init()`` made them; so is the first one after the
    script has initialized Horovod again. It needs :func:`prepare_levels` or
    ``HOROVOD_DYNAMIC_PROCESS_SETS=1``.

    Raises:
        SpaceError: The job has one host, or its hosts have different numbers of ranks.
    """
    known = _known()
    if known.levels is None or not _are_there(known.sets):
        known.sets = _make_sets()
        within, across = known.sets["within", cross_rank()], known.sets["across", local_rank()]
        known.levels = Levels(within, across)
    return known.levels


def _are_there(sets: Mapping[_Key, ProcessSet]) -> bool:
    """Return whether Horovod has all of some sets; the same on all ranks."""
    horovods = [each for each in sets.values() if isinstance(each, HorovodProcessSet)]
    registered = registered_process_sets() if horovods else {}
    return all(registered.get(each.process_set_id) == each.ranks for each in horovods)


def check_levels(exchange: str) -> None:
    """Check that the job has several hosts with several ranks each, equally many.

    Args:
        exchange: What needs that.

    Raises:
        SpaceError: It has not.
    """
    if not is_homogeneous() or local_size() < 2 or cross_size() < 2:
        raise SpaceError(
            f"exchange {exchange!r} does not fit {size()} ranks, {local_size()} of them on this "
            "host",
            hint="Use it with several hosts that have the same number of slots, two or more.",
        )


def _make_sets() -> Mapping[_Key, ProcessSet]:
    check_levels("hierarchical")
    if _MADE and _are_there(_MADE):
        return _MADE
    # Every rank adds all sets, in the same order.
    try:
        return {key: add_process_set(ranks) for key, ranks in _members(hosts_and_slots()).items()}
    except ValueError as error:  # it was initialized without dynamic process sets
        raise SpaceError(
            f"this job has no process sets for the exchange 'hierarchical': {error}",
            hint=f"Set {PROCESS_SETS_VARIABLE}=1 for the job.",
        ) from None


def _places_from_environment(environment: Mapping[str, str]) -> list[tuple[int, int]] | None:
    """Host and slot of each rank, as ``horovodrun`` sets them for ranks of Gloo, host by host.

    ``None`` if this rank has no such variables, or its job has not two levels.
    """
    texts = [environment.get(name, "") for name in PLACE_VARIABLES]
    if not all(each.isdecimal() for each in texts):
        return None
    rank, ranks, slot, slots, host, hosts = map(int, texts)
    if min(slots, hosts) < 2 or ranks != slots * hosts or rank != host * slots + slot:
        return None
    return [divmod(each, slots) for each in range(ranks)]


def _members(places: Sequence[tuple[int, int]]) -> dict[_Key, list[int]]:
    """Ranks of each process set; the sets in the same order on all ranks."""
    members: dict[_Key, list[int]] = {}
    for index, level in enumerate(("within", "across")):
        for which in sorted({place[index] for place in places}):
            ranks = [rank for rank, place in enumerate(places) if place[index] == which]
            members[level, which] = ranks
    return members


def hosts_and_slots() -> list[tuple[int, int]]:
    """Return host and slot of each rank, in order of rank; a collective."""
    own = torch.tensor([[cross_rank(), local_rank()]], device="cpu")
    places = allgather(own, name="hvd_autosync.places").tolist()
    return [(host, slot) for host, slot in places]
