"""Operations of the calling thread's rank: :class:`Collectives` as functions.

The rank is Horovod's, unless the thread runs as one of several ranks of this process
(:mod:`hvd_autosync.runtime.collectives.over_threads`). Objects whose methods are called often, or
by other threads, keep :func:`collectives` from their creation.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from hvd_autosync.runtime.collectives.protocol import MOST_GATHERED_BYTES as MOST_GATHERED_BYTES
from hvd_autosync.runtime.collectives.protocol import CollectiveError as CollectiveError
from hvd_autosync.runtime.collectives.protocol import Collectives as Collectives
from hvd_autosync.runtime.collectives.protocol import Max as Max
from hvd_autosync.runtime.collectives.protocol import ProcessSet as ProcessSet
from hvd_autosync.runtime.collectives.protocol import Sum as Sum

_T = TypeVar("_T")
_OWN: ContextVar[Collectives | None] = ContextVar("hvd_autosync.collectives")
#: Horovod's, once they were needed.
_of_process: Collectives | None = None


def collectives() -> Collectives:
    """Return the collectives of the calling thread."""
    return _OWN.get(_of_process) or _horovods()


@contextmanager
def using(own: Collectives) -> Iterator[None]:
    """Let the calling thread be the rank of ``own``."""
    token = _OWN.set(own)
    try:
        yield
    finally:
        _OWN.reset(token)


def once_per_rank(make: Callable[[], _T]) -> Callable[[], _T]:
    """As ``functools.cache``, for each rank of this process."""
    made: weakref.WeakKeyDictionary[Collectives, _T] = weakref.WeakKeyDictionary()

    @functools.wraps(make)
    def once() -> _T:
        own = collectives()
        if own not in made:
            made[own] = make()
        return made[own]

    return once


def _horovods() -> Collectives:
    global _of_process
    # First, because its import may activate the runtime, which calls this function.
    import horovod.torch  # noqa: F401

    from hvd_autosync.runtime.collectives.over_horovod import HOROVOD

    _of_process = HOROVOD
    return HOROVOD


def all_ranks() -> ProcessSet:
    """As :attr:`Collectives.all_ranks`."""
    return collectives().all_ranks


def of_some_ranks(optimizer: Any) -> bool:
    """Return whether a wrapped optimizer is for a process set: the other ranks make other steps."""
    everyone = all_ranks()
    return getattr(optimizer, "process_set", everyone) is not everyone


def init() -> None:
    """As :meth:`Collectives.init`."""
    collectives().init()


def shutdown() -> None:
    """As :meth:`Collectives.shutdown`."""
    collectives().shutdown()


def rank() -> int:
    """As :meth:`Collectives.rank`."""
    return collectives().rank()


def size() -> int:
    """As :meth:`Collectives.size`."""
    return collectives().size()


def local_rank() -> int:
    """As :meth:`Collectives.local_rank`."""
    return collectives().local_rank()


def local_size() -> int:
    """As :meth:`Collectives.local_size`."""
    return collectives().local_size()


def cross_rank() -> int:
    """As :meth:`Collectives.cross_rank`."""
    return collectives().cross_rank()


def cross_size() -> int:
    """As :meth:`Collectives.cross_size`."""
    return collectives().cross_size()


def is_homogeneous() -> bool:
    """As :meth:`Collectives.is_homogeneous`."""
    return collectives().is_homogeneous()


def mpi_enabled() -> bool:
    """As :meth:`Collectives.mpi_enabled`."""
    return collectives().mpi_enabled()


def copies_to_host(tensor: torch.Tensor) -> bool:
    """As :meth:`Collectives.copies_to_host`."""
    return collectives().copies_to_host(tensor)


def add_process_set(ranks: Sequence[int]) -> ProcessSet:
    """As :meth:`Collectives.add_process_set`."""
    return collectives().add_process_set(ranks)


def allreduce(tensor: torch.Tensor, *, name: str, op: int) -> torch.Tensor:
    """As :meth:`Collectives.allreduce`."""
    return collectives().allreduce(tensor, name=name, op=op)


def allreduce_async_(
    tensor: torch.Tensor,
    *,
    name: str,
    op: int,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> int:
    """As :meth:`Collectives.allreduce_async_`."""
    return collectives().allreduce_async_(
        tensor,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def allgather(tensor: torch.Tensor, *, name: str) -> torch.Tensor:
    """As :meth:`Collectives.allgather`."""
    return collectives().allgather(tensor, name=name)


def allgather_async(
    tensor: torch.Tensor, *, name: str, process_set: ProcessSet | None = None
) -> int:
    """As :meth:`Collectives.allgather_async`."""
    return collectives().allgather_async(tensor, name=name, process_set=process_set)


def allgather_into(
    output: torch.Tensor, tensor: torch.Tensor, *, name: str, process_set: ProcessSet
) -> int:
    """As :meth:`Collectives.allgather_into`."""
    return collectives().allgather_into(output, tensor, name=name, process_set=process_set)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | None = None,
    *,
    name: str,
    process_set: ProcessSet | None = None,
) -> int:
    """As :meth:`Collectives.alltoall_async`."""
    return collectives().alltoall_async(tensor, splits, name=name, process_set=process_set)


def alltoall_into(
    output: torch.Tensor,
    counts: torch.Tensor,
    tensor: torch.Tensor,
    splits: torch.Tensor,
    *,
    name: str,
) -> int:
    """As :meth:`Collectives.alltoall_into`."""
    return collectives().alltoall_into(output, counts, tensor, splits, name=name)


def broadcast_(tensor: torch.Tensor, root: int, *, name: str) -> torch.Tensor:
    """As :meth:`Collectives.broadcast_`."""
    return collectives().broadcast_(tensor, root, name=name)


def poll(handle: int) -> bool:
    """As :meth:`Collectives.poll`."""
    return collectives().poll(handle)


def synchronize(handle: int) -> torch.Tensor:
    """As :meth:`Collectives.synchronize`."""
    return collectives().synchronize(handle)


def join() -> int:
    """As :meth:`Collectives.join`."""
    return collectives().join()
