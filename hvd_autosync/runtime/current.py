"""What this process was told to do; costs nothing to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_autosync.runtime.measure.drift import DriftWatch
    from hvd_autosync.runtime.measure.losses import Losses
    from hvd_autosync.runtime.trial.run_summary import RunSummary
    from hvd_autosync.runtime.trial.trial_run import TrialRun
    from hvd_autosync.search_space.exchange_plan import Classes, ExchangePlan
    from hvd_autosync.search_space.protocol import Protocol
    from hvd_autosync.search_space.schedule import Schedule
    from hvd_autosync.search_space.trial import LossPrediction

#: How gradients travel; ``None``: as Horovod's own optimizer sends them.
plan: ExchangePlan | None = None
#: Which parameters are in which class of the plan.
classes: Classes = {}
#: When replicas are made equal; ``None``: after every step.
schedule: Schedule | None = None
#: Whether ranks wait for each other; ``None``: in every step.
protocol: Protocol | None = None

#: When a worker of ours began, in seconds of ``time.monotonic``; before its script did.
began_at: float | None = None
#: Whether this process belongs to a trial.
trial = False
#: The trial that is measured; ``None`` in the real training and outside of any job of ours.
run: TrialRun | None = None
#: Watches the steps of a real training that was tuned.
watch: DriftWatch | None = None
#: Counts what a run of a recurring job comes to.
run_summary: RunSummary | None = None
#: What the training's losses are, as quality trials of the job predict them.
loss_prediction: LossPrediction | None = None
#: A folder of the driver's, where that is on this host; empty: none.
driver_folder = ""
#: The losses of this process's steps; ``None`` where nobody asks for them.
losses: Losses | None = None


def in_trial() -> bool:
    """Whether this process belongs to a trial of the tuner, and not to the real training.

    For what a script does once for each run and should not do in trials, such as sending a mail or
    starting a run of an experiment tracker. What a training step takes must not depend on it.
    """
    return trial


def waited(seconds: float) -> None:
    """So much of the running step was spent waiting for other ranks."""
    if run is not None:
        run.recorder.blocked += seconds
    if watch is not None:
        watch.waited(seconds)


def mark_step() -> None:
    """Say that a training step ends here.

    For scripts whose steps are not calls of ``DistributedOptimizer.step()``: from the first call
    on only these marks are counted. Does nothing outside of jobs of ours.
    """
    if run is not None:
        run.mark()
    if watch is not None:
        watch.mark()
    if run_summary is not None:
        run_summary.mark()


def average(optimizer: Any) -> None:
    """Make the parameters of ``optimizer`` the same on all ranks now; a collective.

    For scripts that evaluate or save elsewhere than between passes over a ``DataLoader``, or have
    none: under a schedule of local steps replicas are apart in the meantime. Does nothing where
    they are never apart, as with Horovod's own optimizer.

    Args:
        optimizer: The wrapped optimizer.
    """
    for part in (getattr(optimizer, "_local", None), getattr(optimizer, "_protocols", None)):
        if part is not None:
            part.average_for_script()


def report(metric: Any) -> None:
    """Say what the loss of this step is, in every step before ``optimizer.step()``.

    For scripts whose ``backward()`` is called with something else. Smaller must be better; from the
    first call on only what is reported counts. Does nothing where no loss is asked for.

    Args:
        metric: A number, or a tensor of one.
    """
    if losses is not None:
        import torch

        losses.report(torch.as_tensor(metric).detach())


def outcome(metric: Any) -> None:
    """Say what this training came to, on rank 0: larger is better.

    For jobs that recur (``--autosync-recurring``), whose runs are compared by it: an accuracy, or a
    loss of data that it was not trained with, negated. The last call counts. Does nothing in any
    other job.

    Args:
        metric: A number, or a tensor of one; the same measure in every run.
    """
    if run_summary is not None:
        run_summary.outcome(float(metric))


def forget_run() -> None:
    """Take no further part in the job; called in forked children, such as data loaders."""
    global run, watch, run_summary
    run = watch = run_summary = None
