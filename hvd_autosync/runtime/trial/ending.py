"""Ends a run on all ranks together, at a step boundary, and cleans up."""

from __future__ import annotations

import contextlib
import logging
import resource
import statistics
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from hvd_autosync.runtime.collectives.launcher_use import finalize_mpi
from hvd_autosync.runtime.collectives.operations import (
    CollectiveError,
    Sum,
    allreduce,
    shutdown,
    size,
)
from hvd_autosync.runtime.collectives.protocol import Join
from hvd_autosync.runtime.driver.processes import exit_with_children
from hvd_autosync.search_space.trial import MIN_MEASURED_STEPS, StepTime, enough_steps

if TYPE_CHECKING:
    from hvd_autosync.runtime.trial.trial_run import TrialRun

#: Standard errors by which a step time must exceed the threshold for pruning.
_CONFIDENCE = 3.0
#: Longest wait for the other ranks and for Horovod's shutdown.
_SHUTDOWN_LIMIT_S = 10.0


def should_prune(step_s: Sequence[float], above_s: float) -> bool:
    """Return whether measured steps, in seconds, exclude a step time below ``above_s``."""
    if len(step_s) < MIN_MEASURED_STEPS:
        return False
    estimate = StepTime.from_steps(step_s)
    return estimate.mean_s - _CONFIDENCE * estimate.standard_error_s > above_s


def vote_prune(step_s: Sequence[float], above_s: float) -> bool:
    """Return whether every rank's steps should be pruned (:func:`should_prune`).

    A collective: all ranks call it after the same number of steps. A rank that waits in ``join()``
    counts as a vote against.

    Args:
        step_s: This rank's measured steps, seconds.
        above_s: The threshold, seconds.
    """
    prune = int(should_prune(step_s, above_s))
    votes = allreduce(torch.tensor([prune], device="cpu"), name="hvd_autosync.prune", op=Sum)
    return bool(votes.item() == size())


def agree_enough(step_s: Sequence[float], most: int) -> int:
    """Return how many of ``most`` steps to measure (:func:`enough_steps`).

    A collective: all ranks call it after the same number of steps. Steps of a rank that waits in
    ``join()`` count as zero seconds, so that more steps are measured.

    Args:
        step_s: Steps of this rank before the measured ones, seconds.
        most: Largest number.
    """
    # Sums of integers are equal on all ranks.
    usual_us = torch.tensor([round(1e6 * statistics.median(step_s or [0.0]))], device="cpu")
    total_us = allreduce(usual_us, name="hvd_autosync.enough", op=Sum)
    return enough_steps(1e-6 * total_us.item() / size(), most)


def leave(*, shut_down: bool = False) -> NoReturn:
    """End this process with status 0 together with the other ranks.

    Args:
        shut_down: Whether the others have shut Horovod down already.
    """
    for stream in (sys.stdout, sys.stderr):
        # The script may have closed or replaced them.
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        logging.shutdown()
    # Horovod's shutdown can hang; the process ends after the limit nevertheless.
    thread = threading.Thread(target=_leave_horovod, args=(shut_down,), daemon=True)
    thread.start()
    thread.join(_SHUTDOWN_LIMIT_S)
    exit_with_children(0)


def _leave_horovod(shut_down: bool) -> None:
    # After this allreduce every rank has finished the last collective of the training. Without it a
    # fast rank's shutdown could fail one that a slow rank still waits for. It fails itself if the
    # script has shut Horovod down. While Horovod shuts down, no operation may be begun: it would
    # wait for a lock with Python's in hand, while Horovod's thread, which holds that lock, waits
    # for Python's to free a tensor (ProcessSetTable::Finalize_ in process_set.cc).
    if not shut_down:
        with contextlib.suppress(CollectiveError, ValueError):
            allreduce(torch.zeros(1, device="cpu"), name="hvd_autosync.end", op=Sum)
    endpoints = sys.modules.get("hvd_autosync.runtime.collectives.endpoint")
    if endpoints is not None:
        endpoints.abort_all("the run has ended")
    shutdown()
    # Horovod finalizes MPI only if it initialized it; mpirun reports a rank that does not.
    finalize_mpi()


def leaving_join(join: Join, run: TrialRun) -> Join:
    """Wrap ``join()`` so that a rank leaves it when the others end the run.

    If they shut Horovod down while a rank waits in ``join()``, that call fails, which must not look
    like a crash.

    Args:
        join: ``horovod.torch.join``.
        run: The trial.
    """

    def joined(device: int) -> int:
        try:
            last = join(device)
        except CollectiveError:
            run.leave("steps", shut_down=True)
        run.all_joined()
        return last

    return joined


def peak_memory_bytes() -> int:
    """Peak resident memory of this process, plus the accelerator's."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_initialized():
        resident += torch.cuda.max_memory_allocated()
    return resident
