"""The real training: the user's job, once, under the strategy that was found."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hvd_autosync.launch.command import launch, launcher_environment
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Strategy, TrialSpec
from hvd_autosync.search_space.exchange_plan import Classes
from hvd_autosync.search_space.schedule import beyond_horovod
from hvd_autosync.search_space.trial import DRIFT_FILE, FALLBACK_FILE, OUTCOME_FILE, LossPrediction

#: A SIGTERM to the whole process group reaches the launcher without us. A second one at the same
#: moment would catch its handler inside ``Event.set`` and block it for ever (``gloo_run.py``).
_PASS_ON_AFTER_S = 1.0
#: How often it is looked whether the loss guard has ended the strategy.
_LOOK_S = 1.0
#: ``mpirun`` takes a second SIGINT within 5 s for an order to leave everything behind.
_PASS_SIGINT_ON_AFTER_S = 6.0


@dataclass(frozen=True)
class TrainingContext:
    """What is known of a training before it runs.

    Attributes:
        classes: Which parameters are in which class of its strategy.
        loss_prediction: Of its first windows.
        expected_step_s: Seconds of a step, as tuning measured it; 0: unknown.
    """

    classes: Classes = field(default_factory=dict)
    loss_prediction: LossPrediction = LossPrediction()
    expected_step_s: float = 0.0


@dataclass(frozen=True)
class RunReport:
    """What rank 0 of a run of a recurring job has said of it.

    Attributes:
        metric: What the script says it came to, larger is better; ``None`` where it says nothing.
        loss: Mean of its last training losses; ``None`` where none was seen.
        samples: Samples of all ranks together; 0 where they could not be counted.
        steps: Steps of rank 0.
        fell_back: Whether its guard has ended the strategy, and the run went on exactly.
        without_barrier: Whether ranks have made steps without waiting for each other.
    """

    metric: float | None = None
    loss: float | None = None
    samples: int = 0
    steps: int = 0
    fell_back: bool = False
    without_barrier: bool = False

    @classmethod
    def read(cls, folder: str) -> RunReport | None:
        """What was written into ``folder``, if anything."""
        try:
            fields = json.loads(Path(folder, OUTCOME_FILE).read_text())
            return cls(**fields)
        except (OSError, ValueError, TypeError):
            return None


@dataclass(frozen=True)
class RunOutcome:
    """How a training ended.

    Attributes:
        status: The exit status of ``horovodrun``; 128 plus the signal's number when one ended it,
            or somebody stopped it by one.
        drift: What rank 0 said of steps that became slower for good, where it is on this host.
        outcome: What it said of a run of a recurring job, likewise.
        stopped: Whether somebody stopped it, as with Ctrl-C.
    """

    status: int
    drift: str = ""
    outcome: RunReport | None = None
    stopped: bool = False


#: Called once, as soon as the loss guard has ended the strategy, with the step and the reason; not
#: in the thread that runs the training.
OnFallback = Callable[[int, str], None]


def run_training(
    job: Job,
    strategy: Strategy,
    known: TrainingContext | None = None,
    *,
    summarized: bool = False,
    on_fallback: OnFallback | None = None,
) -> RunOutcome:
    """Run ``job`` under ``strategy`` with this terminal as its own.

    SIGINT, SIGTERM and SIGHUP are passed on. Whatever ends this process ends the job.

    Args:
        job: The job.
        strategy: What it runs under.
        known: What is known of it.
        summarized: Whether it is a run of a recurring job, whose outcome is asked for.
        on_fallback: Told where a rank is on this host.

    Raises:
        AutosyncError: The system refuses to launch it.
    """
    with contextlib.ExitStack() as stack:
        folder = ""
        with contextlib.suppress(OSError):  # nothing is written down then
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvd-autosync-"))
        spec = _worker_spec(strategy, known or TrainingContext(), folder, summarized)
        if folder and on_fallback is not None and beyond_horovod(strategy):
            stack.enter_context(_watch_for_fallback(folder, on_fallback))
        status, stopped = _run(job, strategy, launcher_environment(strategy, spec))
        outcome = RunReport.read(folder) if summarized and folder else None
        with contextlib.suppress(OSError):  # there is none
            drift = Path(folder, DRIFT_FILE).read_text()
            return RunOutcome(status, drift, outcome, stopped)
    return RunOutcome(status, outcome=outcome, stopped=stopped)


@contextlib.contextmanager
def _watch_for_fallback(folder: str, on_fallback: OnFallback) -> Iterator[None]:
    """Look into ``folder`` meanwhile, for a fall-back: this process may be killed before the end.

    Args:
        folder: Where ranks on this host write.
        on_fallback: What is to be done.
    """
    over = threading.Event()

    def look() -> None:
        last = False
        while not last:
            last = over.wait(_LOOK_S)
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                said = json.loads(Path(folder, FALLBACK_FILE).read_text())
                on_fallback(int(said["step"]), str(said["reason"]))
                return

    thread = threading.Thread(target=look, name="hvd-autosync-fallback", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _run(job: Job, strategy: Strategy, environment: dict[str, str]) -> tuple[int, bool]:
    """The exit status, and whether a signal came meanwhile."""
    process: subprocess.Popen[bytes] | None = None
    signals = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if process is None:
            raise SystemExit(128 + number)
        if number in signals[:-1]:
            return  # it will be passed on
        alone = number == signal.SIGINT and strategy.get("controller", job.controller) != "gloo"
        delay_s = _PASS_SIGINT_ON_AFTER_S if alone else _PASS_ON_AFTER_S
        if number == signal.SIGINT and not alone:
            # Horovod's launcher for Gloo takes both alike, but while it is still being imported
            # SIGINT alone would end it with a traceback.
            number = signal.SIGTERM
        timer = threading.Timer(delay_s, process.send_signal, [number])
        timer.daemon = True
        timer.start()

    previous = {}
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            previous[number] = signal.signal(number, pass_on)
    try:
        process = launch(job, strategy, environment)
        status = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if status and signals:
        status = 128 + signals[0]
    return status if status >= 0 else 128 - status, bool(signals)


def _worker_spec(
    strategy: Strategy, known: TrainingContext, folder: str, summarized: bool
) -> TrialSpec | None:
    """Workers know of us only when they have something to do or to watch."""
    spec = TrialSpec(
        "training",
        strategy,
        warmup_steps=0,
        measured_steps=0,
        classes=known.classes,
        loss_prediction=known.loss_prediction,
        expected_step_s=known.expected_step_s,
        drift_folder=folder,
        summarized=summarized,
    )
    return spec if beyond_horovod(strategy) or spec.watched or summarized else None
