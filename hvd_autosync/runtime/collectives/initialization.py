"""What ``hvd.init()`` was given, and what has to be the same when Horovod is initialized again."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.common.process_sets import ProcessSet
from horovod.torch import mpi_ops

from hvd_autosync.runtime.collectives.launcher_use import finalize_at_end, import_mpi4py
from hvd_autosync.search_space.horovod_settings import (
    PROCESS_SETS_VARIABLE,
    kept_by_horovod,
    launched_by_mpi,
)
from hvd_autosync.util import patches
from hvd_autosync.util.instances import instances
from hvd_autosync.util.variables import with_variables


@dataclass(frozen=True)
class Initialization:
    """The last ``hvd.init()`` of the script.

    Attributes:
        comm: Its argument of that name.
        dynamic: ``HOROVOD_DYNAMIC_PROCESS_SETS`` as Horovod read it.
        keeps_mpi: Whether its MPI had been initialized before, so that ``shutdown()`` leaves it
            alone.
        took_s: Seconds that it took on this rank, waiting for the others included.
    """

    comm: Any
    dynamic: str | None
    keeps_mpi: bool
    took_s: float

    @property
    def comm_is_freed(self) -> bool:
        """Whether ``comm`` is a communicator that is no longer valid."""
        if self.comm is None or isinstance(self.comm, Iterable):  # ranks
            return False
        return not self.comm  # mpi4py's way to ask whether it is the null communicator


#: ``None`` before ``hvd.init()``, and if it was called before :func:`record_initialization`.
_LAST: Initialization | None = None
#: Variables of :func:`kept_by_horovod` that Horovod has read in this process.
_READ: set[str] = set()
#: Called before each ``hvd.init()`` that follows a ``hvd.shutdown()``, and after each.
_WATCHERS: list[tuple[Callable[[], None], Callable[[], None]]] = []


def last_initialization() -> Initialization | None:
    """Return the last ``hvd.init()`` of the script; ``None`` if it is not known."""
    return _LAST


def variables_read() -> frozenset[str]:
    """Variables that Horovod has read, and whose value it keeps until it reads another."""
    return frozenset(_READ)


def record_initialization() -> None:
    """Record from now on what ``hvd.init()`` is given; call it before the script can.

    In a job under MPI, ``hvd.init()`` then imports mpi4py first. The import initializes MPI, and
    Horovod does not end an MPI that it has not initialized.
    """
    if launched_by_mpi(os.environ):
        finalize_at_end()
    patches.install("initialization", _recording)


def watch_initialization(again: Callable[[], None], initialized: Callable[[], None]) -> None:
    """Watch each ``hvd.init()`` from now on; :func:`record_initialization` comes before.

    Args:
        again: Called before one that is not the first of this process.
        initialized: Called after each.
    """
    _WATCHERS.append((again, initialized))


def _recording(init: Callable[..., None]) -> Callable[..., None]:
    # Of the instance, because scripts may import the functions init() under many names.
    @functools.wraps(init)
    def recording(comm: Any = None, process_sets: Any = None) -> None:
        global _LAST
        if mpi_ops._basics.is_initialized():
            init(comm, process_sets)
            return
        if launched_by_mpi(os.environ):
            import_mpi4py()  # re-initialization is refused where it is not installed
        for again, _ in _WATCHERS if _LAST is not None else ():
            again()
        keeps_mpi = _mpi_is_initialized()
        _READ.update(kept_by_horovod().keys() & os.environ.keys())
        began = time.monotonic()
        init(comm, process_sets)
        took_s = time.monotonic() - began
        keeps_mpi = keeps_mpi and mpi_ops.mpi_enabled() and _mpi_has(mpi_ops.size())
        _LAST = Initialization(comm, os.environ.get(PROCESS_SETS_VARIABLE), keeps_mpi, took_s)
        for _, initialized in _WATCHERS:
            initialized()

    return recording


def registered_process_sets() -> dict[int, list[int]]:
    """Ranks of each process set of this job but the global one, by its number."""
    found = mpi_ops._basics._get_process_set_ids_and_ranks()
    return {number: list(ranks) for number, ranks in sorted(found.items()) if number}


def initialize_again(
    known: Mapping[int, list[int]], added: Sequence[ProcessSet] = (), removed: Collection[int] = ()
) -> None:
    """Shut Horovod down, and initialize it as the script did; a collective.

    Process sets stay, those that the script has added later too: the same objects have new numbers.

    Args:
        known: The process sets, as :func:`registered_process_sets` returned them before any rank
            could shut down: Horovod on the other ranks ends with it.
        added: Further ones that Horovod has afterwards, in the same order on all ranks.
        removed: Numbers of those that it has no longer.
    """
    global _LAST
    last = _LAST
    assert last is not None, "checked before"
    library = mpi_ops._basics
    # Scripts may also have copied or unpickled some.
    all_sets = instances(ProcessSet)
    objects: dict[int, list[ProcessSet]] = {
        number: [p for p in all_sets if (p.process_set_id, p.ranks) == (number, ranks)]
        for number, ranks in known.items()
    }
    # The script may have dropped the object of a set: on this rank only, for all we know.
    wanted = [
        next(iter(objects[number]), None) or ProcessSet(ranks)
        for number, ranks in known.items()
        if number not in removed
    ]
    mpi_ops.shutdown()
    kept = {name: value for name, value in kept_by_horovod().items() if name in _READ}
    kept = {name: os.environ.get(name, value) for name, value in kept.items()}
    with with_variables({**kept, PROCESS_SETS_VARIABLE: last.dynamic}), _nothing_at_exit():
        library.init(last.comm, [*wanted, *added])
    _LAST = last  # what the script's own took
    for number in removed:
        for gone in objects.pop(number):
            gone.process_set_id = None  # as Horovod does
    for same, each in zip(objects.values(), wanted, strict=True):
        for other in same:
            other.process_set_id = each.process_set_id
            other.ranks = each.ranks


@contextlib.contextmanager
def _nothing_at_exit() -> Iterator[None]:
    """Let ``init()`` register no further ``shutdown()``, which would come before the script's own.

    Functions that the script has registered after its ``init()`` may use Horovod.
    """

    class Nothing:
        register = staticmethod(lambda *_: None)

    patches.install("end of the process", lambda _: Nothing)
    try:
        yield
    finally:
        patches.uninstall("end of the process")


def _mpi_is_initialized() -> bool:
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized())


def _mpi_has(ranks: int) -> bool:
    """Return whether mpi4py's world may have Horovod's ranks.

    An mpi4py for another MPI than Horovod's makes each process a world of its own.
    """
    return int(sys.modules["mpi4py.MPI"].COMM_WORLD.Get_size()) >= ranks
