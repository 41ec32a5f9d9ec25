"""The operations of some steps: what they have to send, and as many that send nothing."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops

Start = Callable[..., int]


@dataclass(frozen=True)
class Operation:
    """One operation, as this rank begins it.

    Attributes:
        kind: Horovod's name of it.
        among: The process set.
        members: The ranks that take part, in the order of their ring.
        own_bytes: Bytes that this rank puts in.
        split_bytes: Of these the bytes for each member, where each gets another part.
    """

    kind: str
    among: Any
    members: tuple[int, ...]
    own_bytes: int
    split_bytes: tuple[int, ...] = ()

    def leaving_bytes(self, rank: int, slots: int) -> float:
        """Return the bytes that leave this rank's host on its way, by the law of its kind.

        A ring sends to its next member; in an alltoall each sends to each.

        Args:
            rank: This rank.
            slots: Ranks on each host.
        """
        host, members = rank // slots, self.members
        if self.kind == "alltoall":
            parts = zip(members, self.split_bytes, strict=True)
            return sum(part for member, part in parts if member // slots != host)
        count = len(members)
        following = members[(members.index(rank) + 1) % count]
        if following // slots == host:
            return 0.0
        blocks = 2 * (count - 1) / count if self.kind == "allreduce" else count - 1
        return blocks * self.own_bytes


class Operations:
    """Notes the operations that this process begins, while it is entered."""

    def __init__(self) -> None:
        self.begun: list[Operation] = []
        self._replaced: dict[str, Start] = {}

    def __enter__(self) -> Operations:
        notes = {
            "_allreduce_async": lambda tensor, *_: self._note("allreduce", _[-1], tensor),
            "_allgather_async": lambda tensor, *_: self._note("allgather", _[-1], tensor),
            "_alltoall_async": lambda tensor, splits, *_: self._note(
                "alltoall", _[-1], tensor, splits
            ),
        }
        for name, note in notes.items():
            self._replaced[name] = start = getattr(mpi_ops, name)
            setattr(mpi_ops, name, _noting(start, note))
        return self

    def __exit__(self, *_: object) -> None:
        for name, start in self._replaced.items():
            setattr(mpi_ops, name, start)

    def _note(
        self, kind: str, among: Any, tensor: torch.Tensor, splits: torch.Tensor | None = None
    ) -> None:
        everyone = among.process_set_id == 0
        members = tuple(range(mpi_ops.size()) if everyone else among.ranks)
        own_bytes = tensor.numel() * tensor.element_size()
        split_bytes: tuple[int, ...] = ()
        if kind == "alltoall":
            rows = len(tensor)
            counts = [rows // len(members)] * len(members) if splits is None else splits.tolist()
            split_bytes = tuple(own_bytes * each // max(rows, 1) for each in counts)
        self.begun.append(Operation(kind, among, members, own_bytes, split_bytes))


def repeat_empty(operations: Sequence[Operation], steps: int) -> None:
    """Make as many operations of these kinds, with an element for each rank, all at once.

    Ranks begin operations in orders of their own, so names have the number within a kind.

    Args:
        operations: The operations of some steps.
        steps: How many steps; as many operations are made as in one.
    """
    seen: Counter[tuple[str, int]] = Counter()
    wanted = Counter((each.kind, each.among.process_set_id) for each in operations)
    begun = []
    for each in operations:
        group = each.among
        kind = each.kind, group.process_set_id
        seen[kind] += 1
        if seen[kind] > wanted[kind] // steps:
            continue
        name = f"empty.{each.kind}.{kind[1]}.{seen[kind]}"
        tensor = torch.zeros(len(each.members))
        if each.kind == "allreduce":
            begun.append(mpi_ops.allreduce_async_(tensor, name=name, process_set=group))
        elif each.kind == "allgather":
            begun.append(mpi_ops.allgather_async(tensor[:1], name, group))
        else:
            begun.append(mpi_ops.alltoall_async(tensor, None, name, group))
    for handle in begun:
        mpi_ops.synchronize(handle)


def _noting(start: Start, note: Callable[..., None]) -> Start:
    @functools.wraps(start)
    def noting(*arguments: Any) -> int:
        note(*arguments)
        return start(*arguments)

    return noting
