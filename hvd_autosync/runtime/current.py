"""The worker context: the settings of this process. Importing it costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_autosync.runtime.live.live_tuning import LiveTuning
    from hvd_autosync.runtime.measure.drift import DriftWatch
    from hvd_autosync.runtime.measure.losses import Losses
    from hvd_autosync.runtime.trial.run_summary import RunSummary
    from hvd_autosync.runtime.trial.trial_run import TrialRun
    from hvd_autosync.search_space.strategy import Strategy
    from hvd_autosync.search_space.sync_plan import SyncPlan
    from hvd_autosync.search_space.trial import LossPrediction

#: The strategy under which this process was launched; ``None``: as the script says.
strategy: Strategy | None = None
#: How ranks synchronize; ``None``: as by Horovod's own optimizer.
sync_plan: SyncPlan | None = None

#: When this worker began, before its script, in seconds of ``time.monotonic``.
began_at: float | None = None
#: Whether torch was loaded then, as in a forked trial.
torch_was_loaded = False
#: The variable of torch's threads then, and when the script imported torch, perhaps empty;
#: ``None``: not known.
threads_variable: str | None = None
threads_at_import: str | None = None
#: Torch's number of threads when it was loaded after the script's begin, and whether the script has
#: chosen another before it imported Horovod.
loaded_threads: int | None = None
script_set_threads = False
#: Whether this process belongs to a trial.
trial = False
#: The trial that is measured; ``None`` in the real training and outside of our jobs.
run: TrialRun | None = None
#: Tunes the training in its own steps.
live: LiveTuning | None = None
#: Watches the steps of a real training that was tuned.
watch: DriftWatch | None = None
#: Summary of a run of a recurring job.
run_summary: RunSummary | None = None
#: The losses that quality trials of the job predict for the training.
loss_prediction: LossPrediction | None = None
#: Whether the script has called :func:`average`.
script_averages = False
#: The driver's folder, if the driver is on this host; else empty.
driver_folder = ""
#: The losses of this process's steps; ``None`` if they are not needed.
losses: Losses | None = None


def in_trial() -> bool:
    """Return whether this process belongs to a trial of the tuner, not to the real training.

    Use it for what a script does once per run and should not do in trials, such as sending an email
    or starting a run of an experiment tracker. What a training step costs must not depend on it.
    """
    return trial


def waited(seconds: float) -> None:
    """Add seconds of the current step that were spent waiting for other ranks."""
    if run is not None:
        run.recorder.blocked += seconds
    if live is not None:
        live.waited(seconds)
    if watch is not None:
        watch.waited(seconds)


class NotingFailure:
    """A context that lets live tuning know of a step's exception, which the script may catch.

    Every step enters it several times, so it is no generator.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _traceback: object
    ) -> None:
        if live is not None and isinstance(error, Exception):
            live.step_failed()


noting_failure = NotingFailure()


def mark_step() -> None:
    """Mark the end of a training step.

    Use it in scripts whose steps are not calls of ``DistributedOptimizer.step()``: from the first
    call on, only these marks are counted. It does nothing outside of our jobs.
    """
    if run is not None:
        run.mark()
    if live is not None:
        live.mark()
    if watch is not None:
        watch.mark()
    if run_summary is not None:
        run_summary.mark()


def average(optimizer: Any) -> None:
    """Make the parameters of ``optimizer`` the same on all ranks now; a collective.

    Use it in scripts that evaluate or save elsewhere than between epochs of a ``DataLoader``, or
    that have none: under a schedule of local steps replicas differ in the meantime. It does nothing
    if replicas never differ, as with Horovod's own optimizer.

    Args:
        optimizer: The wrapped optimizer.
    """
    global script_averages
    script_averages = True
    average_now = getattr(optimizer, "_hvd_autosync_average", None)
    if average_now is not None:
        average_now()


def report(metric: Any) -> None:
    """Report the loss of this step, in every step, before or after ``optimizer.step()``.

    Call it on every rank: losses are compared and averaged over all. Use it in scripts whose
    ``backward()`` is called with something else, such as a loss that is scaled by other means than
    PyTorch's ``GradScaler``, or whose optimizers have losses of their own. Without it the loss of a
    step is the sum of all whose ``backward()`` was called in it. Smaller must be better. From the
    first call on, only reported losses count, the last one of each step. It does nothing if losses
    are not needed.

    Args:
        metric: A number, or a tensor of one element.
    """
    if losses is not None:
        import torch

        losses.report(torch.as_tensor(metric).detach())


def outcome(metric: Any) -> None:
    """Report the result of this training, on rank 0; larger is better.

    It compares the runs of recurring jobs (``--autosync-recurring``): an accuracy, or a negated
    loss on data not used for training. The last call counts. It does nothing in other jobs.

    Args:
        metric: A number, or a tensor of one element; the same measure in every run.
    """
    if run_summary is not None:
        run_summary.outcome(float(metric))


def forget_run() -> None:
    """Leave the job; called in forked children, such as data loaders."""
    global run, live, watch, run_summary
    run = live = watch = run_summary = None
