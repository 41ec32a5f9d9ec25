"""What the runtime needs of its ranks: an interface.

``over_horovod.py`` implements it for jobs, ``over_threads`` for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_autosync.search_space.exchange_plan import MOST_GATHERED_BYTES as MOST_GATHERED_BYTES

#: Raised by operations if another rank is gone, or ranks disagree about an operation.
CollectiveError = HorovodInternalError
#: Reductions; the numbers are Horovod's.
Sum: Final = 1
Max: Final = 4
#: A call of ``join()``; its argument is the device of the zeros that a waiting rank sends.
Join: TypeAlias = Callable[[int], int]


class ProcessSet(Protocol):
    """Some ranks of the job."""

    def size(self) -> int:
        """Return how many they are."""

    def rank(self) -> int:
        """Return the place of this rank among them."""


class Collectives(Protocol):
    """One rank's view of the others.

    An operation is done once all ranks of its process set have called it by the same name, in any
    order among other operations. Those that return a handle do not block, and their tensors must
    stay as they are until :meth:`synchronize` has returned. While a rank waits in :meth:`join`,
    zeros take the place of its tensors in sums; other operations fail.

    Any of them raises :data:`CollectiveError` if another rank is gone, or the ranks' tensors do not
    match; those with handles may raise it in :meth:`synchronize` only.
    """

    @property
    def all_ranks(self) -> ProcessSet:
        """The process set of all ranks."""

    def init(self) -> None:
        """Meet the other ranks; before it, there are no ranks.

        Everything but :meth:`wrap_join` and :meth:`before_leaving` raises ``ValueError`` then.
        """

    def shutdown(self) -> None:
        """Part from the other ranks; operations in progress fail on all of them."""

    def rank(self) -> int:
        """Return the number of this rank, from 0."""

    def size(self) -> int:
        """Return how many ranks there are."""

    def local_rank(self) -> int:
        """Return the number of this rank on its host."""

    def local_size(self) -> int:
        """Return how many ranks its host has."""

    def cross_rank(self) -> int:
        """Return the number of its host."""

    def cross_size(self) -> int:
        """Return how many hosts have its local rank."""

    def is_homogeneous(self) -> bool:
        """Return whether all hosts have the same number of ranks."""

    def mpi_enabled(self) -> bool:
        """Return whether ranks can also send messages over MPI."""

    def copies_to_host(self, tensor: torch.Tensor) -> bool:
        """Return whether it reduces a GPU's tensor on the host, whence torch copies the result."""

    def add_process_set(self, ranks: Sequence[int]) -> ProcessSet:
        """Make a process set; all ranks of the job do, in the same order.

        The script may have one of the same ranks, which is the same one then.
        """

    def allreduce(self, tensor: torch.Tensor, *, name: str, op: int) -> torch.Tensor:
        """Reduce over all ranks; returns the result."""

    def allreduce_async_(
        self,
        tensor: torch.Tensor,
        *,
        name: str,
        op: int,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet | None = None,
    ) -> int:
        """Start to reduce in place, over all ranks or a process set; returns the handle.

        Args:
            tensor: Of the same shape and type on all ranks, contiguous.
            name: The name.
            op: The reduction.
            prescale_factor: Factor before the reduction.
            postscale_factor: Factor after it.
            process_set: The ranks that take part; ``None``: all.
        """

    def allgather(self, tensor: torch.Tensor, *, name: str) -> torch.Tensor:
        """Concatenate the tensors of all ranks, whose first dimensions may differ."""

    def allgather_async(
        self, tensor: torch.Tensor, *, name: str, process_set: ProcessSet | None = None
    ) -> int:
        """Start :meth:`allgather`; returns the handle."""

    def allgather_into(
        self, output: torch.Tensor, tensor: torch.Tensor, *, name: str, process_set: ProcessSet
    ) -> int:
        """:meth:`allgather_async` into existing memory, with as many elements as the result."""

    def alltoall_async(
        self,
        tensor: torch.Tensor,
        splits: torch.Tensor | None = None,
        *,
        name: str,
        process_set: ProcessSet | None = None,
    ) -> int:
        """Start to send each rank a part of ``tensor``; returns the handle.

        The output is a pair: the received parts in the order of ranks, concatenated, and how many
        rows came from each.

        Args:
            tensor: The parts, one after the other.
            splits: Rows of each part, of type int32; ``None``: parts are equal.
            name: The name.
            process_set: The ranks that take part; ``None``: all.
        """

    def alltoall_into(
        self,
        output: torch.Tensor,
        counts: torch.Tensor,
        tensor: torch.Tensor,
        splits: torch.Tensor,
        *,
        name: str,
    ) -> int:
        """:meth:`alltoall_async` among all ranks, into existing memory for both outputs."""

    def broadcast_(self, tensor: torch.Tensor, root: int, *, name: str) -> torch.Tensor:
        """Overwrite ``tensor`` by that of rank ``root``."""

    def poll(self, handle: int) -> bool:
        """Return whether :meth:`synchronize` would return at once."""

    def synchronize(self, handle: int) -> torch.Tensor:
        """Wait until an operation is done; returns its output."""

    def join(self) -> int:
        """Wait until all ranks have called it; returns the last one to do so."""

    def wrap_join(self, wrap: Callable[[Join], Join]) -> None:
        """Replace :meth:`join` by ``wrap`` of it, also where scripts call it."""

    def before_leaving(self, action: Callable[[], None]) -> None:
        """Call ``action`` before every :meth:`join` and :meth:`shutdown`, which drop operations."""
