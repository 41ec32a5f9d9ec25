"""Activates the runtime right after ``horovod.torch`` was imported in a worker."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from collections.abc import Mapping
from multiprocessing import parent_process
from pathlib import Path

import torch

from hvd_autosync import extensions
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.operation_names import name_operations
from hvd_autosync.runtime.collectives.operations import collectives
from hvd_autosync.runtime.driver.sender import Sender
from hvd_autosync.runtime.measure.losses import Losses
from hvd_autosync.runtime.optimizer.optimizer import DistributedOptimizer, broadcast_optimizer_state
from hvd_autosync.runtime.patches.backward import watch_backward
from hvd_autosync.runtime.patches.epochs import watch_epochs
from hvd_autosync.runtime.patches.evaluation import watch_evaluation
from hvd_autosync.runtime.patches.join_hook import watch_join
from hvd_autosync.runtime.patches.seeds import seed_everything
from hvd_autosync.runtime.trial.ending import leaving_join
from hvd_autosync.runtime.trial.trial_run import TrialRun
from hvd_autosync.search_space.families.transport import THREADS_PER_RANK, THREADS_VARIABLE
from hvd_autosync.search_space.knobs import Value
from hvd_autosync.search_space.sync_plan import sync_plan
from hvd_autosync.search_space.trial import ENDED_FILE, TrialSpec
from hvd_autosync.util import patches

_LOG = logging.getLogger(__name__)


def activate(spec: TrialSpec, sender: Sender | None = None) -> None:
    """Replace Horovod's ``DistributedOptimizer`` by ours and, in a trial, start measuring.

    Repeated calls, as after a reload of ``horovod.torch``, change nothing.

    Args:
        spec: The trial; ``measured_steps == 0`` means the real training.
        sender: Sends messages to the driver; needed by a trial only.
    """
    extensions.load()
    _LOG.debug("strategy %s, %d measured steps", dict(spec.strategy), spec.measured_steps)
    current.sync_plan = plan = sync_plan(spec.strategy, spec.classes)
    _set_threads(spec.strategy)
    current.loss_prediction, current.driver_folder = spec.loss_prediction, spec.driver_folder
    replace_optimizer()
    if plan is not None and plan.exchange.two_levels:
        from hvd_autosync.runtime.collectives.levels import prepare_levels  # few strategies need it

        prepare_levels()
    if plan is not None and plan.replicas_may_differ:
        watch_join()
    if plan is not None and plan.protocol is not None:
        from hvd_autosync.runtime.collectives.messaging import (
            prepare_messaging,  # few strategies need it
        )

        prepare_messaging()
    if spec.driver_folder:
        _report_end(spec.driver_folder)
    if spec.watched and current.watch is None:
        from hvd_autosync.runtime.measure.drift import DriftWatch  # trials do not need it

        current.watch = DriftWatch(spec.expected_step_s, spec.driver_folder, spec.round_steps)
        watch_epochs(current.watch.epoch_begins)
        watch_evaluation(current.watch.unlike_others)
        os.register_at_fork(after_in_child=current.forget_run)
    if spec.summarized and current.run_summary is None:
        from hvd_autosync.runtime.trial.run_summary import RunSummary  # trials do not need it

        if current.losses is None:
            current.losses = Losses()
            watch_backward(current.losses)
        current.run_summary = RunSummary(current.losses, spec.driver_folder)
        atexit.register(current.run_summary.write)
        os.register_at_fork(after_in_child=current.forget_run)
    if sender is None or current.run is not None:
        return
    if spec.seed:
        seed_everything(spec.seed)
    current.run = run = TrialRun(spec, sender)
    current.losses = run.recorder.losses
    os.register_at_fork(after_in_child=current.forget_run)
    watch_backward(current.losses, lambda: run.profiling.profiler)
    watch_evaluation(run.unlike_others)
    collectives().wrap_join(lambda join: leaving_join(join, run))


def replace_optimizer() -> None:
    """Replace Horovod's optimizer by ours, and name the script's operations, which are beside."""
    name_operations()
    patches.install("strategy optimizer", lambda _: DistributedOptimizer)
    patches.install("optimizer broadcast", lambda _: broadcast_optimizer_state)


def _set_threads(strategy: Mapping[str, Value]) -> None:
    """Let torch compute with the strategy's number of threads, unless the user has set another.

    OpenMP reads its variable when it is loaded: in a forked trial before that was set. In a process
    of its own the script may have chosen a number meanwhile.
    """
    loaded = current.loaded_threads
    current.script_set_threads = loaded is not None and torch.get_num_threads() != loaded
    if current.script_set_threads:
        return
    threads = strategy.get(THREADS_PER_RANK.name, THREADS_PER_RANK.knob.default)
    if threads and os.environ.get(THREADS_VARIABLE) == str(threads):
        torch.set_num_threads(int(threads))


def _report_end(folder: str) -> None:
    """Have a file in the driver's folder once this process ends by itself, not by a signal."""
    own = os.getpid()

    def report() -> None:
        # The driver may be on another host. What the script forks or spawns is no rank.
        with contextlib.suppress(OSError):
            if os.getpid() == own and parent_process() is None:
                Path(folder, ENDED_FILE).touch()

    atexit.register(report)
