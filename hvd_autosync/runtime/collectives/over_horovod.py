"""Collectives over Horovod: its own functions, with no work of ours around an operation.

Where a public function of Horovod's does no more than look at deprecated arguments and call a
private one, the private one is called: so the way through this module takes no longer than a call
of the public function. Only the wait for an operation is ours where ranks have one processor each.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvd_autosync.runtime.collectives.protocol import CollectiveError, Collectives, Join, ProcessSet
from hvd_autosync.runtime.collectives.shared_sets import shared_process_set
from hvd_autosync.util import patches

_ALL = mpi_ops.global_process_set
#: Pause after an operation has failed. All operations of the process fail together, and Horovod's
#: thread then frees them under the lock of its process sets; for each it needs Python's lock
#: (``ProcessSetTable::Finalize_`` in process_set.cc). An operation that began meanwhile would wait
#: for the one with the other in hand, for ever.
_FREEING_S = 0.05
#: Pause between two looks at an operation, where a rank has a single processor.
_PAUSE_S = 1e-4


@functools.cache
def _one_processor_each(ranks: int) -> bool:
    """Return whether this host has less than two processors for each of its ranks."""
    return len(os.sched_getaffinity(0)) < 2 * ranks


def _wait(handle: int) -> None:
    """Wait for an operation, if Horovod's own wait would delay it.

    That one looks all the time (``WaitAndClear`` in horovod/torch/mpi_ops_v2.cc). Where a rank has
    a single processor, it so takes it from the thread that makes the operation.
    """
    if _one_processor_each(mpi_ops.local_size()):
        while not mpi_ops.poll(handle):
            time.sleep(_PAUSE_S)


class OverHorovod:
    """The collectives of a process that is one rank."""

    all_ranks: ProcessSet = _ALL
    rank = staticmethod(mpi_ops.rank)
    size = staticmethod(mpi_ops.size)
    local_rank = staticmethod(mpi_ops.local_rank)
    local_size = staticmethod(mpi_ops.local_size)
    cross_rank = staticmethod(mpi_ops.cross_rank)
    cross_size = staticmethod(mpi_ops.cross_size)
    is_homogeneous = staticmethod(mpi_ops.is_homogeneous)
    mpi_enabled = staticmethod(mpi_ops.mpi_enabled)
    poll = staticmethod(mpi_ops.poll)
    shutdown = staticmethod(mpi_ops.shutdown)

    def __init__(self) -> None:
        #: ``join()`` with all that it was wrapped in; Horovod's own before the first.
        self._join: Join = mpi_ops.join
        self._before_leaving: list[Callable[[], None]] = []

    def init(self) -> None:
        mpi_ops.init()  # may be replaced

    def copies_to_host(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and not mpi_ops.nccl_built()

    def add_process_set(self, ranks: Sequence[int]) -> ProcessSet:
        made: ProcessSet = shared_process_set(ranks)
        return made

    def allreduce(self, tensor: torch.Tensor, *, name: str, op: int) -> torch.Tensor:
        output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        handle = mpi_ops._allreduce_async(tensor, output, name, op, 1.0, 1.0, _ALL)
        self.synchronize(handle)
        return output

    def synchronize(self, handle: int) -> Any:
        try:
            if handle in mpi_ops._handle_map and not mpi_ops.poll(handle):
                _wait(handle)
            return mpi_ops.synchronize(handle)
        except CollectiveError:
            time.sleep(_FREEING_S)
            raise

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
        among = _ALL if process_set is None else process_set
        handle: int = mpi_ops._allreduce_async(
            tensor, tensor, name, op, prescale_factor, postscale_factor, among
        )
        return handle

    def allgather(self, tensor: torch.Tensor, *, name: str) -> torch.Tensor:
        output: torch.Tensor = self.synchronize(self.allgather_async(tensor, name=name))
        return output

    def allgather_async(
        self, tensor: torch.Tensor, *, name: str, process_set: ProcessSet | None = None
    ) -> int:
        handle: int = mpi_ops.allgather_async(tensor, name, process_set or _ALL)
        return handle

    def allgather_into(
        self, output: torch.Tensor, tensor: torch.Tensor, *, name: str, process_set: ProcessSet
    ) -> int:
        handle: int = mpi_ops._allgather_async(tensor, output, name, process_set)
        return handle

    def alltoall_async(
        self,
        tensor: torch.Tensor,
        splits: torch.Tensor | None = None,
        *,
        name: str,
        process_set: ProcessSet | None = None,
    ) -> int:
        handle: int = mpi_ops.alltoall_async(tensor, splits, name, process_set or _ALL)
        return handle

    def alltoall_into(
        self,
        output: torch.Tensor,
        counts: torch.Tensor,
        tensor: torch.Tensor,
        splits: torch.Tensor,
        *,
        name: str,
    ) -> int:
        handle: int = mpi_ops._alltoall_async(tensor, splits, output, counts, name, _ALL)
        return handle

    def broadcast_(self, tensor: torch.Tensor, root: int, *, name: str) -> torch.Tensor:
        self.synchronize(mpi_ops.broadcast_async_(tensor, root, name))
        return tensor

    def join(self) -> int:
        last: int = mpi_ops.join()  # may be replaced
        return last

    def wrap_join(self, wrap: Callable[[Join], Join]) -> None:
        def replacing(join: Callable[..., int]) -> Callable[..., int]:
            self._join = join

            @functools.wraps(join)
            def joined(device: int = -1) -> int:
                return self._join(device)

            return joined

        patches.install("join", replacing)
        self._join = wrap(self._join)

    def before_leaving(self, action: Callable[[], None]) -> None:
        def acting(function: Callable[..., Any]) -> Callable[..., Any]:
            def act_first(*args: Any) -> Any:
                for each in reversed(self._before_leaving):
                    each()
                return function(*args)

            return act_first

        # Functions of the library, because scripts may have imported the Python functions already.
        # Python's shutdown() drops operations in a first call; at exit there is the second alone.
        patches.install("join and shutdown", acting, undo=self._before_leaving.clear)
        self._before_leaving.append(action)


#: The only one.
HOROVOD: Collectives = OverHorovod()
