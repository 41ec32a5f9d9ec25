"""What this process was told to do; costs nothing to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_autosync.runtime.trial_run import TrialRun
    from hvd_autosync.search_space.exchange_plan import Classes, ExchangePlan

#: How gradients travel; ``None``: as Horovod's own optimizer sends them.
plan: ExchangePlan | None = None
#: Which parameters are in which class of the plan.
classes: Classes = {}

#: The trial that is measured; ``None`` in the real training and outside of any job of ours.
run: TrialRun | None = None


def mark_step() -> None:
    """Say that a training step ends here.

    For scripts whose steps are not calls of ``DistributedOptimizer.step()``: from the first call
    on only these marks are counted. Does nothing outside a trial.
    """
    if run is not None:
        run.mark()


def forget_run() -> None:
    """Take no further part in the trial; called in forked children, such as data loaders."""
    global run
    run = None
