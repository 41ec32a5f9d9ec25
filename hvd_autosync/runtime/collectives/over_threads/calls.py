"""What the operations of ranks in threads do, once all ranks have called them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_autosync.runtime.collectives.protocol import Sum


@dataclass(eq=False)
class Call:
    """One rank's part of an operation.

    Attributes:
        rank: The rank.
        kind: ``allreduce``, ``allgather``, ``alltoall`` or ``broadcast``.
        name: The name.
        tensor: What it sends.
        detail: What else ranks must agree on: the reduction and its factors, or the root.
        outputs: Where results belong; ``None``: into new memory.
        splits: Rows for each rank, of an alltoall.
        sent: The values at the call.
        done: Whether it has ended.
        error: Why it failed.
        result: Its output.
        late: Polls that do not tell yet that it is done.
    """

    rank: int
    kind: str
    name: str
    tensor: torch.Tensor
    detail: tuple[Any, ...] = ()
    outputs: tuple[torch.Tensor, ...] | None = None
    splits: list[int] = field(default_factory=list)
    sent: torch.Tensor = field(init=False)
    done: bool = False
    error: str = ""
    result: Any = None
    late: int = 0

    def __post_init__(self) -> None:
        self.sent = self.tensor.detach().clone()

    def describe(self) -> str:
        """Return the rank and what it sends, for messages."""
        shape = tuple(self.tensor.shape)
        return f"rank {self.rank}: {self.kind} of {self.tensor.dtype} {shape} {self.detail}"


def perform(parts: Sequence[Call], joined: int) -> str:
    """Do an operation; returns why it is impossible, if so.

    Args:
        parts: The ranks' calls, in the order of its process set.
        joined: How many ranks of it wait in ``join()``.
    """
    first = parts[0]
    if joined and not (first.kind == "allreduce" and first.detail[0] == Sum):
        return f"{first.kind} {first.name!r} while a rank waits in join()"
    if any(_form(part) != _form(first) for part in parts):
        described = "; ".join(part.describe() for part in parts)
        return f"ranks disagree about {first.name!r}: {described}"
    for part in parts:
        if not torch.equal(_octets(part.tensor), _octets(part.sent)):
            return f"rank {part.rank} has changed a tensor of {first.name!r} before it was sent"
    if first.kind == "alltoall" and any(
        sum(part.splits) != len(part.tensor) or len(part.splits) != len(parts) for part in parts
    ):
        return f"the splits of {first.name!r} do not add up to its rows"
    _RESULTS[first.kind](parts)
    return ""


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _form(call: Call) -> tuple[Any, ...]:
    """Return what must be equal on all ranks."""
    shape = tuple(call.tensor.shape)
    varies = call.kind in ("allgather", "alltoall")
    return call.kind, call.detail, call.tensor.dtype, len(shape), shape[varies:]


def _allreduce(parts: Sequence[Call]) -> None:
    op, before, after = parts[0].detail
    scaled = [part.sent if before == 1.0 else part.sent * before for part in parts]
    total = scaled[0].clone()
    for each in scaled[1:]:
        total = total + each if op == Sum else torch.maximum(total, each)
    if after != 1.0:
        total = total * after
    for part in parts:
        _deliver(part, total.to(part.tensor.dtype))


def _allgather(parts: Sequence[Call]) -> None:
    for part in parts:
        _deliver(part, torch.cat([each.sent for each in parts]))


def _alltoall(parts: Sequence[Call]) -> None:
    pieces = [part.sent.split(part.splits) for part in parts]
    for place, part in enumerate(parts):
        received = [of_source[place] for of_source in pieces]
        counts = torch.tensor([len(each) for each in received], dtype=torch.int32, device="cpu")
        _deliver(part, torch.cat(received), counts)


def _broadcast(parts: Sequence[Call]) -> None:
    (root,) = parts[0].detail
    values = next(part.sent for part in parts if part.rank == root)
    for part in parts:
        _deliver(part, values)


_RESULTS: dict[str, Callable[[Sequence[Call]], None]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "broadcast": _broadcast,
}


def _deliver(call: Call, *values: torch.Tensor) -> None:
    if call.outputs is None:
        results = tuple(value.clone() for value in values)
    else:
        results = call.outputs
        for output, value in zip(results, values, strict=True):
            # Horovod writes into the memory (TorchTensor::data in its torch/adapter_v2.cc), and the
            # version stays; detach() shares its counter.
            output.data.copy_(value.view_as(output))
    call.result = results[0] if len(values) == 1 else results
