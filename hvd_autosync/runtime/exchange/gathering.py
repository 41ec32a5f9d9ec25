"""Allgathers of messages whose lengths differ: among all ranks at once, or in two levels.

A ring carries all messages but one over each link between neighbours: of n = h L ranks, L on each
of h hosts, n - 1 messages go from host to host. In two levels each rank first exchanges messages
with the ranks of its slot on other hosts, and then what it has with those of its host: (h - 1) L
messages leave a host. Both are alltoalls of all ranks, so that neither needs process sets.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

import torch

from hvd_autosync.runtime.collectives.operations import all_ranks
from hvd_autosync.runtime.exchange.exchanges import gather, send_pieces

#: As ``Steps`` of an exchange; returns the messages of all ranks, one behind the other.
Gathered: TypeAlias = Generator[int, Any, torch.Tensor]


class Gathering:
    """One allgather.

    Args:
        ranks: Number of ranks.

    Attributes:
        places: For each rank the place of its message among those that are gathered.
    """

    def __init__(self, ranks: int) -> None:
        self.places: Sequence[int] = range(ranks)

    def gather(self, message: torch.Tensor, name: str) -> Gathered:
        """Gather the messages of all ranks, tensors of one dimension."""
        gathered: torch.Tensor = yield gather(message, name)
        return gathered


class LevelsGathering(Gathering):
    """An exchange across hosts, and one within them.

    Args:
        hosts_and_slots: Of each rank, in order of rank; equally many slots on each host.
        rank: This rank.
    """

    def __init__(self, hosts_and_slots: Sequence[tuple[int, int]], rank: int) -> None:
        super().__init__(len(hosts_and_slots))
        host, slot = hosts_and_slots[rank]
        self._across = [its_slot == slot for _, its_slot in hosts_and_slots]
        self._within = [its_host == host for its_host, _ in hosts_and_slots]
        order = [
            each
            for its_host, local_slot in hosts_and_slots
            if its_host == host
            for each, (_, its_slot) in enumerate(hosts_and_slots)
            if its_slot == local_slot
        ]
        self.places = [order.index(each) for each in range(len(order))]

    def gather(self, message: torch.Tensor, name: str) -> Gathered:
        """Gather them across hosts, then within this host what its ranks have."""
        for level, receives in (("across", self._across), ("within", self._within)):
            pieces = [message if each else None for each in receives]
            message, _ = yield send_pieces(pieces, f"{name}.{level}", all_ranks())
        return message
