"""Exchanges: how one bucket of gradients is reduced over all ranks.

An exchange is a generator. It yields the handle of each asynchronous Horovod operation that it
starts, receives that operation's output once it is done, and has left the result in its tensor when
it ends. So several exchanges can be in progress at once, without threads of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from hvd_autosync.runtime.collectives.levels import Levels
from hvd_autosync.runtime.collectives.operations import (
    ProcessSet,
    Sum,
    all_ranks,
    allgather_async,
    allgather_into,
    allreduce_async_,
    alltoall_async,
)
from hvd_autosync.runtime.state.partition import cut_evenly

#: What an exchange yields and receives.
Steps: TypeAlias = Generator[int, torch.Tensor, None]
#: Reduces a flat tensor over all ranks, in place; arguments are the tensor and a name.
Exchange: TypeAlias = Callable[[torch.Tensor, str], Steps]


@dataclass(frozen=True)
class Scaling:
    """Factors of a reduction: each rank's gradient before the sum, and the sum.

    Horovod's average of n ranks with ``gradient_predivide_factor`` f multiplies by 1 / f before and
    by f / n after the sum (``horovod/torch/optimizer.py``, ``horovod/torch/mpi_ops.py``).
    """

    before: float = 1.0
    after: float = 1.0


#: Sums a flat tensor over some ranks, in place, with a name and factors.
Reduction: TypeAlias = Callable[[torch.Tensor, str, Scaling, ProcessSet], Steps]


def allreduce(tensor: torch.Tensor, name: str, scaling: Scaling, among: ProcessSet) -> Steps:
    """One allreduce of Horovod's."""
    yield allreduce_async_(
        tensor,
        name=name,
        op=Sum,
        process_set=among,
        prescale_factor=scaling.before,
        postscale_factor=scaling.after,
    )


class Flat:
    """One reduction over all ranks.

    Args:
        scaling: Its factors.
        reduction: The reduction.
    """

    def __init__(self, scaling: Scaling, reduction: Reduction = allreduce) -> None:
        self._scaling = scaling
        self._reduction = reduction

    def __call__(self, tensor: torch.Tensor, name: str) -> Steps:
        return self._reduction(tensor, name, self._scaling, all_ranks())


class Hierarchical:
    """A two-level reduction: a sum within hosts, one across hosts, an allgather within hosts.

    Only the second operation uses the network, and there each of a host's L ranks carries 1 / L of
    the bytes: 2 (h - 1) / h of the tensor leave each of h hosts, where a ring of all n = h L ranks
    sends 2 (n - 1) / n of it from host to host.

    Args:
        levels: The two levels.
        bounds: The elements that this rank carries across hosts (:func:`own_bounds`), one at least.
        like: A tensor of the type and on the device of what is reduced.
        scaling: Factors of the whole.
        reduction: The reduction across hosts.
    """

    def __init__(
        self,
        levels: Levels,
        bounds: tuple[int, int],
        like: torch.Tensor,
        scaling: Scaling,
        reduction: Reduction = allreduce,
    ) -> None:
        self._levels = levels
        self._own = slice(*bounds)
        self._piece = like.new_empty(bounds[1] - bounds[0])
        self._within = Scaling(before=scaling.before)
        self._across = Scaling(after=scaling.after)
        self._reduction = reduction

    def __call__(self, tensor: torch.Tensor, name: str) -> Steps:
        within = self._levels.within
        yield from allreduce(tensor, f"{name}.within", self._within, within)
        self._piece.copy_(tensor[self._own])
        yield from self._reduction(self._piece, f"{name}.across", self._across, self._levels.across)
        yield gather_into(tensor, self._piece, f"{name}.gather", within)


def own_bounds(size: int, unit: int, levels: Levels) -> tuple[int, int]:
    """Return the elements of a tensor that this rank carries across hosts.

    Args:
        size: Elements of the tensor.
        unit: Elements that stay together, as those of a matrix's row.
        levels: The two levels.
    """
    return cut_evenly(size, levels.within.size(), unit)[levels.within.rank()]


def add_at(sums: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """Add ``values[i]`` to ``sums[places[i]]`` for each i, in the same order on every rank.

    Args:
        sums: Shape ``(n,)`` or ``(n, columns)``.
        places: Shape ``(k,)``; they may repeat.
        values: Shape ``(k,)`` or ``(k, columns)``.
    """
    if sums.is_cuda:
        # index_put_ sorts. scatter_add_ adds in the order of threads, and replicas would diverge.
        sums.index_put_((places,), values, accumulate=True)
    else:
        sums.scatter_add_(0, places.view(-1, *[1] * (values.dim() - 1)).expand_as(values), values)


def gather(tensor: torch.Tensor, name: str, among: ProcessSet | None = None) -> int:
    """Allgather of tensors that may have different first dimensions; returns the handle."""
    return allgather_async(tensor, name=name, process_set=among)


def gather_into(output: torch.Tensor, tensor: torch.Tensor, name: str, among: ProcessSet) -> int:
    """Allgather into existing memory, where Horovod's own would allocate every time.

    Args:
        output: Has as many elements as the pieces of all ranks together; it must stay unused until
            the operation is done.
        tensor: This rank's piece.
        name: Name of the operation.
        among: The ranks that take part.

    Returns:
        The operation's handle.
    """
    return allgather_into(output, tensor, name=name, process_set=among)


def send_pieces(pieces: Sequence[torch.Tensor | None], name: str, among: ProcessSet) -> int:
    """Send a piece to each rank; pieces may have different lengths.

    Args:
        pieces: The piece for each rank, of one dimension; ``None``: nothing.
        name: Name of the operation.
        among: The ranks that take part.

    Returns:
        The operation's handle; its output is the concatenation of what was received, in the order
        of the ranks, and the lengths.
    """
    sent = torch.cat([piece for piece in pieces if piece is not None])
    lengths = [0 if piece is None else len(piece) for piece in pieces]
    splits = torch.tensor(lengths, dtype=torch.int32, device="cpu")
    return alltoall_async(sent, splits, name=name, process_set=among)
