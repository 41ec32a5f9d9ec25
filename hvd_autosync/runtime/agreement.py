"""What all ranks must have in common before they exchange anything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from horovod.torch.mpi_ops import allgather, broadcast_, rank, size

from hvd_autosync.errors import ConfigurationError


def agree_parameters(described: Sequence[tuple[str, str]]) -> None:
    """Check that all ranks have the same parameters; a collective.

    Args:
        described: Name and description (shape, type, class) of each, in order.

    Raises:
        ConfigurationError: Some rank differs; names the first parameter that does.
    """
    digest = hashlib.sha256(json.dumps(described).encode()).digest()[:8]
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    digests = allgather(own[None], name="hvd_autosync.parameters.digest")
    if bool((digests == digests[0]).all()):
        return
    text = torch.frombuffer(bytearray(json.dumps(described).encode()), dtype=torch.uint8)
    lengths = allgather(torch.tensor([len(text)]), name="hvd_autosync.parameters.lengths").tolist()
    texts = allgather(text, name="hvd_autosync.parameters").split(lengths)
    all_described = [json.loads(bytes(t.tolist())) for t in texts]
    raise ConfigurationError(
        _difference(all_described),
        hint="Build the same model on every rank, with the same parameters frozen.",
    )


def _difference(all_described: Sequence[Sequence[Sequence[str]]]) -> str:
    first = all_described[0]
    for other in range(1, len(all_described)):
        for index in range(max(len(first), len(all_described[other]))):
            mine = tuple(first[index]) if index < len(first) else ("nothing", "")
            yours = all_described[other]
            theirs = tuple(yours[index]) if index < len(yours) else ("nothing", "")
            if mine != theirs:
                return (
                    f"ranks have different parameters: number {index} is {' '.join(mine).strip()} "
                    f"on rank 0, {' '.join(theirs).strip()} on rank {other}"
                )
    return f"ranks have different parameters; this is rank {rank()} of {size()}"


def agree_order(order: Sequence[int], name: str) -> list[int]:
    """Rank 0's ``order``, on every rank; a collective.

    Args:
        order: Whole numbers; as many on every rank.
        name: Name of the operation.
    """
    numbers = torch.tensor(order, dtype=torch.int64)
    if len(numbers):
        broadcast_(numbers, 0, name=f"hvd_autosync.{name}")
    agreed: list[int] = numbers.tolist()
    return agreed
