"""The real training: the user's job, once, under the strategy that was found."""

from __future__ import annotations

import signal
import subprocess
import threading
from types import FrameType

from hvd_autosync.launch.command import launch, launcher_environment
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Strategy, TrialSpec
from hvd_autosync.search_space.exchange_plan import Classes
from hvd_autosync.search_space.schedule import beyond_horovod

#: A SIGTERM to the whole process group reaches the launcher without us. A second one at the same
#: moment would catch its handler inside ``Event.set`` and block it for ever (``gloo_run.py``).
_PASS_ON_AFTER_S = 1.0


def run_training(
    job: Job, strategy: Strategy, classes: Classes | None = None, ceilings: tuple[float, ...] = ()
) -> int:
    """Run ``job`` under ``strategy`` with this terminal as its own.

    Ctrl-C reaches the job from the terminal, as it would without us; SIGTERM and SIGHUP are passed
    on. Whatever ends this process ends the job.

    Args:
        job: The job.
        strategy: What it runs under.
        classes: Which parameters are in which class of the strategy.
        ceilings: Highest healthy losses (``TrialSpec.loss_ceilings``).

    Returns:
        The exit status of ``horovodrun``; 128 plus the signal's number when a signal ended it.

    Raises:
        AutosyncError: The system refuses to launch it.
    """
    environment = launcher_environment(strategy, _worker_spec(strategy, classes or {}, ceilings))
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        if process is None:
            raise SystemExit(128 + number)
        timer = threading.Timer(_PASS_ON_AFTER_S, process.send_signal, [number])
        timer.daemon = True
        timer.start()

    previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on)}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, pass_on)
    try:
        process = launch(job, strategy, environment)
        previous[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def _worker_spec(
    strategy: Strategy, classes: Classes, ceilings: tuple[float, ...]
) -> TrialSpec | None:
    """Workers know of us only when the strategy has something for them to do."""
    if not beyond_horovod(strategy):
        return None
    return TrialSpec(
        "training", strategy, warmup_steps=0, measured_steps=0, classes=classes,
        loss_ceilings=ceilings,
    )  # fmt: skip
