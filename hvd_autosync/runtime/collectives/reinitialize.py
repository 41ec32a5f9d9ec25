"""Initializes Horovod again in a running training, with other variables.

Horovod reads its variables in ``hvd.init()`` only. Between two steps, where nothing is under way,
it can be shut down and initialized again in the same processes (:func:`reinitialize`); parameters,
optimizers and process sets stay what they are. All ranks first agree that it is possible, so that
none is left without Horovod. It can have more process sets afterwards, or fewer.

Horovod 0.28.1 was not made for it in every respect:

- Under Gloo ranks meet at a rendezvous server, and those of an earlier meeting would be found at
  the old one. Rank 0 runs a new one, for this time only.
- MPI cannot be initialized twice. Horovod leaves it alone if mpi4py has initialized it
  (:func:`~hvd_autosync.runtime.collectives.initialization.record_initialization`).
- It crashes if a process has ever set both the fusion threshold and the cycle time
  (``ParameterManager::BayesianParameter::SetValue`` writes into a vector that is empty then).
- It keeps values of variables that are not set any more; they are set to Horovod's defaults.
- Once a process has set the cycle time, its fusion threshold is 1 MiB after each further
  initialization: the same function writes the default cycle time, 1, where
  the threshold stands. The fusion threshold itself can be changed as often as one likes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from horovod.common.process_sets import ProcessSet
from horovod.torch import mpi_ops

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.collectives.addresses import own_address
from hvd_autosync.runtime.collectives.initialization import (
    initialize_again,
    last_initialization,
    registered_process_sets,
    variables_read,
)
from hvd_autosync.runtime.collectives.rendezvous_server import rendezvous_server
from hvd_autosync.runtime.collectives.settling import settle, steps_without_barrier
from hvd_autosync.runtime.collectives.standstill import in_flight, others_wait, signals_wait
from hvd_autosync.runtime.collectives.time_limit import time_limit
from hvd_autosync.search_space.horovod_settings import (
    AUTOTUNE_VARIABLE,
    CYCLE_VARIABLE,
    FUSION_VARIABLE,
    RENDEZVOUS_ADDRESS,
    RENDEZVOUS_PORT,
    TIMELINE_VARIABLE,
    changeable_variables,
    is_elastic,
)
from hvd_autosync.util.print_line import print_line
from hvd_autosync.util.variables import set_variables, with_variables

#: Longest time without Horovod, seconds. A rank that waits for one that has ended would wait for 30
#: seconds under Gloo, and end with an error that names nothing; under MPI it would wait for ever.
_LIMIT_S = 20.0
#: It is at least so many times what the script's own ``hvd.init()`` took, as among many ranks.
_TIMES_INIT = 3.0
#: Held by the thread that ends this process.
_ENDING = threading.Lock()
_NAME = "hvd_autosync.reinitialize"
#: This host's address and why it has none, once they are known: they are found by collectives.
_ADDRESS: list[tuple[str, str]] = []
_NO_BOUNDARY = "steps have no barrier now, so ranks have no common boundary"


class CannotReinitializeError(AutosyncError):
    """This job cannot initialize Horovod again, or not with these variables; nothing was done."""


class NotNowError(AutosyncError):
    """Operations of Horovod are under way on some rank; nothing was done. Try the next boundary."""


@dataclass(frozen=True)
class _Report:
    """What one rank says before anything is done.

    Attributes:
        refusal: Why it cannot be done; empty if it can.
        busy: What is under way; empty if nothing is.
        request: What must be the same on all ranks.
        rendezvous: Rank 0's variables of the new rendezvous, if there is one.
        init_s: Seconds that ``hvd.init()`` took; on the last rank to call it, without waiting.
    """

    refusal: str
    busy: str
    request: list[Any]
    rendezvous: dict[str, str | None]
    init_s: float = 0.0


@dataclass(frozen=True)
class _Job:
    """What must be the same afterwards.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        process_sets: Ranks of each process set but the global one.
    """

    rank: int
    size: int
    process_sets: list[list[int]]


def _job(process_sets: Iterable[list[int]]) -> _Job:
    return _Job(mpi_ops.rank(), mpi_ops.size(), list(process_sets))


def check_reinitialize(variables: Mapping[str, str | None]) -> str | None:
    """Return why Horovod cannot be initialized again with ``variables``; a collective.

    Args:
        variables: As for :func:`reinitialize`, the same on all ranks.

    Returns:
        The reason, the same on all ranks; ``None`` if it can be done. Whether operations are under
        way does not count.
    """
    if steps_without_barrier():  # the others may never come
        return _NO_BOUNDARY
    own = _own_refusal(variables)
    return _refusal(_gather(_Report(own, "", [sorted(variables.items())], {})))


def reinitialize(
    variables: Mapping[str, str | None],
    added: Sequence[ProcessSet] = (),
    removed: Sequence[ProcessSet] = (),
) -> None:
    """Shut Horovod down and initialize it again with other variables; a collective.

    Call it between two steps, from the main thread of every rank. Other threads that call Horovod
    meanwhile wait, and so do signals that Python handles. A rank that cannot be
    initialized, because another one has ended, ends with one line in its error output.

    Args:
        variables: Variables to set, or to unset if ``None``: some of ``changeable_variables()`` of
            :mod:`~hvd_autosync.search_space.horovod_settings`, the same on all ranks.
        added: Process sets that Horovod does not have yet, in the same order on all ranks.
        removed: Process sets that it has no longer then.

    Raises:
        CannotReinitializeError: It is refused; raised on all ranks, nothing has changed. In a phase
            without a barrier it is raised without waiting for the other ranks.
        NotNowError: Operations are under way on some rank; raised on all ranks, nothing has
            changed.
        RuntimeError: This rank can start no thread; nothing has changed here, but the others end.
    """
    if steps_without_barrier():  # the others may never come
        raise _cannot(_NO_BOUNDARY)
    settle()
    own = _own_refusal(variables)
    with signals_wait(), others_wait(), ExitStack() as stack:
        busy = in_flight()
        # While a process set is being added, Horovod does not tell which there are.
        known = {} if busy else registered_process_sets()
        gone = {each.process_set_id for each in removed}
        of_sets = [[each.ranks for each in added], sorted(gone)]
        request = [sorted(variables.items()), sorted(known.items()), of_sets]
        rendezvous: dict[str, str | None] = {}
        if _meets_at_a_server():
            address, problem = _address()
            if mpi_ops.rank() == 0 and not (own or busy or problem):
                try:
                    rendezvous = stack.enter_context(_rendezvous(address))
                except (OSError, RuntimeError) as error:  # no port, descriptor or thread is left
                    problem = f"ranks cannot meet at {address}: {error}"
            # Only rank 0's is needed.
            own = own or (problem if mpi_ops.rank() == 0 else "")
        last = last_initialization()
        init_s = 0.0 if last is None else last.took_s
        reports = _gather(_Report(own, busy, request, rendezvous, init_s))
        _check(reports)
        begin = functools.partial(initialize_again, known, added, gone)
        kept = [ranks for number, ranks in known.items() if number not in gone]
        wanted = _job([*kept, *(each.ranks for each in added)])
        _restart(begin, wanted, variables, reports[0].rendezvous, _limit_s(reports))


def _limit_s(reports: list[_Report]) -> float:
    """Longest time without Horovod in this job, seconds."""
    return max(_LIMIT_S, _TIMES_INIT * min(report.init_s for report in reports))


def _restart(
    begin: Callable[[], None],
    wanted: _Job,
    variables: Mapping[str, str | None],
    rendezvous: Mapping[str, str | None],
    limit_s: float,
) -> None:
    """Restart Horovod; a rank that cannot ends, because nothing could be done without it.

    Args:
        begin: Does it.
        wanted: What the job has to be afterwards.
        variables: As of :func:`reinitialize`.
        rendezvous: Variables of the rendezvous, if there is one.
        limit_s: Longest time without Horovod.
    """
    rank = wanted.rank

    def end(terminated: bool) -> None:
        hung = f"has hung for {limit_s:.0f} seconds"
        _end(rank, f"another rank has ended, or {'the job is stopped' if terminated else hung}")

    with time_limit(limit_s, end), with_variables(rendezvous):
        set_variables(variables)  # not before the limit, which may be refused a thread
        try:
            begin()
            # Before the others may go on, end, and shut Horovod down with them.
            after = _job(registered_process_sets().values())
            # No rank needs the rendezvous any more once all have initialized.
            mpi_ops.allgather(torch.zeros(1, device="cpu"), name=f"{_NAME}.done")
        except Exception as error:
            _end(rank, f"another rank has probably ended ({error})")
    assert after == wanted


def _end(rank: int, why: str) -> NoReturn:
    """End this process with one line, from whichever thread is the first to call it."""
    _ENDING.acquire()
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
        sys.stdout.flush()
    text = " ".join(why.split())
    print_line(f"rank {rank} cannot initialize Horovod again: {text}. Start the job again.")
    os._exit(1)


def _address() -> tuple[str, str]:
    """Return the address of this host, and why there is none; a collective at the first call."""
    if not _ADDRESS:
        try:
            _ADDRESS.append((own_address("reinitialize"), ""))
        except OSError as error:
            _ADDRESS.append(("", f"the other ranks cannot reach this host: {error}"))
    return _ADDRESS[0]


@contextmanager
def _rendezvous(address: str) -> Iterator[dict[str, str | None]]:
    with rendezvous_server(address) as port:
        yield {RENDEZVOUS_ADDRESS: address, RENDEZVOUS_PORT: str(port)}


def _meets_at_a_server() -> bool:
    return RENDEZVOUS_ADDRESS in os.environ and not mpi_ops.mpi_enabled()


def _own_refusal(variables: Mapping[str, str | None]) -> str:
    """Return why this rank cannot; empty if it can."""
    last = last_initialization()
    if last is None:
        return "hvd.init() was called before hvd_autosync was imported"
    if threading.current_thread() is not threading.main_thread():
        return "it was asked for in another thread than the main one"
    if is_elastic(os.environ):
        return "the job is elastic"
    if TIMELINE_VARIABLE in os.environ:
        return f"Horovod writes a timeline ({TIMELINE_VARIABLE})"
    if os.environ.get(AUTOTUNE_VARIABLE, "0") not in ("", "0"):
        return f"Horovod's own autotuning is on ({AUTOTUNE_VARIABLE})"
    if mpi_ops.mpi_enabled() and not last.keeps_mpi:
        return (
            "Horovod's MPI was not initialized by mpi4py before hvd.init(); install mpi4py for "
            "that MPI"
        )
    if last.comm_is_freed:
        return "the script has freed the communicator that hvd.init() was given; keep it"
    if fixed := sorted({*variables} - {*changeable_variables()}):
        return f"{', '.join(fixed)} cannot be changed in a running job"
    wanted = {name for name, value in variables.items() if value is not None}
    if {FUSION_VARIABLE, CYCLE_VARIABLE} <= variables_read() | wanted:
        return (
            "fusion threshold and cycle time have both been set in this process, or would be: "
            "Horovod 0.28.1 crashes then"
        )
    return ""


def _refusal(reports: list[_Report]) -> str | None:
    for rank, report in enumerate(reports):
        if report.refusal:
            return f"{report.refusal} (rank {rank})"
    # What is under way on one rank only may be the addition of a process set.
    busy = any(report.busy for report in reports)
    if not busy and any(report.request != reports[0].request for report in reports):
        return "ranks ask for different variables, or have different process sets"
    return None


def _cannot(reason: str) -> CannotReinitializeError:
    return CannotReinitializeError(
        f"Horovod cannot be initialized again: {reason}",
        hint="Launch the job again with other variables.",
    )


def _check(reports: list[_Report]) -> None:
    """Raise what the reports of all ranks forbid."""
    if refusal := _refusal(reports):
        raise _cannot(refusal)
    for rank, report in enumerate(reports):
        if report.busy:
            raise NotNowError(
                f"Horovod cannot be initialized again now: {report.busy} on rank {rank}",
                hint="Wait for all operations before, or try it after the next step.",
            )


def _gather(own: _Report) -> list[_Report]:
    """Return the reports of all ranks; a collective of one operation."""
    text = json.dumps(vars(own)).encode() + b"\n"
    gathered = mpi_ops.allgather(
        torch.frombuffer(bytearray(text), dtype=torch.uint8), name=f"{_NAME}.reports"
    )
    lines = gathered.numpy().tobytes().splitlines()
    # Both ways through JSON, so that requests are compared in the same form.
    return [_Report(**json.loads(line)) for line in lines]
