"""Process sets for exchanges of two levels: the ranks of a host, and one rank of each host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from horovod.common.process_sets import ProcessSet, add_process_set
from horovod.torch import mpi_ops

from hvd_autosync.errors import SpaceError


@dataclass(frozen=True)
class Levels:
    """The two process sets of this rank.

    Attributes:
        within: The ranks of this host.
        across: The ranks of all hosts that have this rank's place on their host.
    """

    within: ProcessSet
    across: ProcessSet


@cache
def two_levels() -> Levels:
    """The levels of this job; a collective when it is called first.

    Needs ``HOROVOD_DYNAMIC_PROCESS_SETS=1``, as a strategy with two levels sets it.

    Raises:
        SpaceError: The job has one host, or its hosts have different numbers of ranks.
    """
    local, hosts = mpi_ops.local_size(), mpi_ops.cross_size()
    if not mpi_ops.is_homogeneous() or local < 2 or hosts < 2:
        raise SpaceError(
            f"exchange 'hierarchical' does not fit {mpi_ops.size()} ranks, {local} of them here",
            hint="Use it with several hosts that have the same number of slots, two or more.",
        )
    ranks = _places()
    sets = {}
    for host in range(hosts):
        sets["within", host] = [rank for rank, place in enumerate(ranks) if place[0] == host]
    for slot in range(local):
        sets["across", slot] = [rank for rank, place in enumerate(ranks) if place[1] == slot]
    # Every rank adds all sets, in the same order.
    added = {key: add_process_set(members) for key, members in sets.items()}
    host, slot = mpi_ops.cross_rank(), mpi_ops.local_rank()
    return Levels(added["within", host], added["across", slot])


def _places() -> list[tuple[int, int]]:
    """Host and place of each rank, in order of rank."""
    own = torch.tensor([[mpi_ops.cross_rank(), mpi_ops.local_rank()]])
    places = mpi_ops.allgather(own, name="hvd_autosync.places").tolist()
    return [(host, slot) for host, slot in places]
