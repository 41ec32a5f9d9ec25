"""Collectives by which ranks agree on values."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from hvd_autosync.errors import AutosyncError, ConfigurationError
from hvd_autosync.runtime.collectives.operations import (
    MOST_GATHERED_BYTES,
    Max,
    Sum,
    allgather,
    allreduce,
    allreduce_async_,
    broadcast_,
    poll,
    rank,
    size,
    synchronize,
)

#: Seconds between two checks whether the other ranks are still there.
_LOOK_S = 0.001
_T = TypeVar("_T")


class NotOnAllError(AutosyncError):
    """Some rank cannot do its part; raised on all ranks, which so go on alike."""


def same_on_all(described: Sequence[Any], name: str) -> bool:
    """Return whether plain values are equal on all ranks; a collective.

    Args:
        described: The values.
        name: Name of the operation.
    """
    own = torch.frombuffer(bytearray(_digest(described)[:8]), dtype=torch.uint8)
    digests = allgather(own[None], name=f"hvd_autosync.{name}.digest")
    return bool((digests == digests[0]).all())


def same_by_sums(described: Sequence[Any], name: str) -> bool:
    """:func:`same_on_all` by an allreduce, so that ranks that wait in ``hvd.join()`` do no harm.

    They count as different.

    Args:
        described: The values.
        name: Name of the operation.
    """
    own = int.from_bytes(_digest(described)[:3], "big") + 1
    # Sums of float64 would be inexact from 33 ranks on.
    moments = torch.tensor([own, own**2], dtype=torch.int64, device="cpu")
    sums = allreduce(moments, name=f"hvd_autosync.{name}.sums", op=Sum)
    return bool((sums == size() * moments).all())


def _digest(described: Sequence[Any]) -> bytes:
    return hashlib.sha256(json.dumps(described).encode()).digest()


def agree_parameters(described: Sequence[tuple[str, str]]) -> None:
    """Check that all ranks have the same plan for the same parameters; a collective.

    Args:
        described: Name and description of the plan, and of each parameter (shape, type, class), in
            order.

    Raises:
        ConfigurationError: Some rank differs; the message names the first difference.
    """
    if same_on_all(described, "parameters"):
        return
    all_described = [json.loads(text) for text in gather_texts(json.dumps(described), "parameters")]
    raise ConfigurationError(
        _difference(all_described),
        hint="Build the same model on every rank, with the same parameters frozen and the same "
        "ones together on a device, and give every rank the same strategy.",
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
                    f"ranks have different models or plans: {' '.join(mine).strip()} "
                    f"on rank 0, {' '.join(theirs).strip()} on rank {other}"
                )
    return f"ranks have different models or plans; this is rank {rank()} of {size()}"


def agree_order(order: Sequence[int], name: str) -> list[int]:
    """Rank 0's ``order``, on every rank; a collective.

    Args:
        order: Integers, the same number on every rank, at least one.
        name: Name of the operation.
    """
    numbers = torch.tensor(order, dtype=torch.int64, device="cpu")
    broadcast_(numbers, 0, name=f"hvd_autosync.order.{name}")
    agreed: list[int] = numbers.tolist()
    return agreed


def agree_any(flags: Sequence[bool], name: str) -> list[bool]:
    """For each of ``flags``, whether any rank has it set; a collective.

    Args:
        flags: The same number on every rank, at least one.
        name: Name of the operation.
    """
    return [bool(flag) for flag in agree_most(flags, name)]


def agree_most(counts: Iterable[int], name: str) -> list[int]:
    """For each of ``counts``, the most of any rank; a collective.

    Args:
        counts: The same number on every rank, at least one.
        name: Name of the operation.
    """
    own = torch.tensor([*counts], dtype=torch.int32, device="cpu")
    most: list[int] = allreduce(own, op=Max, name=f"hvd_autosync.any.{name}").tolist()
    return most


def add_up(values: Sequence[float], name: str, check: Callable[[], None]) -> list[float]:
    """Sum the values of all ranks, which may take long; a collective.

    Args:
        values: This rank's.
        name: Name of the operation.
        check: Called while waiting; raises what has gone wrong on another rank.
    """
    sums = torch.tensor(values, dtype=torch.float64, device="cpu")
    handle = allreduce_async_(sums, op=Sum, name=name)
    while not poll(handle):
        check()
        time.sleep(_LOOK_S)
    synchronize(handle)
    return [float(value) for value in sums]


def agree_steps(steps: int, name: str) -> int:
    """Return the largest number of steps that any rank has made; a collective.

    Args:
        steps: This rank's.
        name: Name of the operation.
    """
    most = allreduce(torch.tensor([steps], device="cpu"), name=f"hvd_autosync.steps.{name}", op=Max)
    return int(most.item())


def tell_all(text: bytes, name: str, root: int = 0) -> bytes:
    """Rank ``root``'s ``text``, on every rank; a collective.

    Args:
        text: The text; ignored on other ranks.
        name: Name of the operation.
        root: The rank.
    """
    size_ = torch.tensor([len(text)], device="cpu")
    broadcast_(size_, root, name=f"hvd_autosync.size.{name}")
    buffer = torch.zeros(int(size_.item()), dtype=torch.uint8, device="cpu")
    if len(buffer):
        if rank() == root:
            buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        for piece in buffer.split(MOST_GATHERED_BYTES):
            broadcast_(piece, root, name=f"hvd_autosync.text.{name}")
    return buffer.numpy().tobytes()


def gather_texts(text: str, name: str) -> list[str]:
    """Return every rank's ``text``, in order of rank; a collective.

    Args:
        text: This rank's; not empty.
        name: Name of the operation.
    """
    return [each.decode() for each in gather_bytes(text.encode(), name)]


def gather_bytes(data: bytes, name: str) -> list[bytes]:
    """Return every rank's ``data``, in order of rank; a collective.

    Args:
        data: This rank's; not empty.
        name: Name of the operation.
    """
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    lengths = allgather(
        torch.tensor([len(own)], device="cpu"), name=f"hvd_autosync.lengths.{name}"
    ).tolist()
    most = MOST_GATHERED_BYTES // size()
    texts: list[list[bytes]] = [[] for _ in lengths]
    for begin in range(0, max(lengths), most):
        # A rank that has sent all its bytes sends its first one again, which nobody reads.
        piece = own[begin : begin + most] if begin < len(own) else own[:1]
        counts = [min(length - begin, most) if begin < length else 1 for length in lengths]
        pieces = allgather(piece, name=f"hvd_autosync.texts.{name}").split(counts)
        for text, length, received in zip(texts, lengths, pieces, strict=True):
            if begin < length:
                text.append(received.numpy().tobytes())
    return [b"".join(text) for text in texts]


def on_all(make: Callable[[], _T], name: str, problem: str, hint: str) -> _T:
    """Return what ``make`` returns, if it fails on no rank; a collective.

    Args:
        make: Makes something of this rank's, perhaps by collectives that come before all that can
            fail.
        name: Name of the operation.
        problem: What ranks cannot do if it fails.
        hint: What to do then, unless the failure says so itself.

    Raises:
        NotOnAllError: It fails on some rank.
    """
    failure = None
    try:
        made = make()
    except AutosyncError as error:
        failure = (error.message, error.hint)
    except Exception as error:
        failure = (f"{type(error).__name__}: {error}", "")
    for other, text in enumerate(gather_texts(json.dumps(failure), name)):
        if (known := json.loads(text)) is not None:
            message, own_hint = known
            raise NotOnAllError(f"{problem}; rank {other}: {message}", hint=own_hint or hint)
    return made
