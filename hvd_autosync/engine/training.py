"""The training: one run of the user's job under a strategy."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hvd_autosync.engine.notes_folder import NotesFolder
from hvd_autosync.launch.command import launch, launcher_environment
from hvd_autosync.launch.facts import known_controllers
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.remote import remote_hosts
from hvd_autosync.launch.signals import stop_if_asked
from hvd_autosync.runtime.driver.environment import worker_environment
from hvd_autosync.runtime.live.notes import read_note
from hvd_autosync.search_space import Strategy, TrialSpec
from hvd_autosync.search_space.exchange_plan import Classes
from hvd_autosync.search_space.records import Real, Record
from hvd_autosync.search_space.sync_plan import beyond_horovod
from hvd_autosync.search_space.trial import (
    DRIFT_FILE,
    ENDED_FILE,
    FALLBACK_FILE,
    OUTCOME_FILE,
    TRAINING,
    LossPrediction,
)
from hvd_autosync.util.packed_text import pack
from hvd_autosync.util.variables import (
    BEGUN_NOTE,
    ENDED_NOTE,
    FOLDER_VARIABLE,
    JOB_VARIABLE,
    JUDGED_VARIABLE,
    LIVE_VARIABLE,
    REFUSAL_VARIABLE,
    RESUMED_NOTE,
    STOPPED_VARIABLE,
    STUDY_NOTE,
)

#: Delay of a forwarded signal. A SIGTERM to the whole process group also reaches the launcher
#: directly. A second one at the same moment would interrupt the launcher's handler inside
#: ``Event.set`` and block it for ever (``gloo_run.py``).
_FORWARD_AFTER_S = 1.0
#: Files in a folder of the driver's: why a training cannot be tuned in its own steps, and that it
#: was stopped from outside.
REFUSAL_FILE, _STOPPED_FILE = "refusal", "stopped"
#: Interval of the checks for a fallback of the loss guard.
_POLL_S = 1.0
#: Delay of a forwarded SIGINT for ``mpirun``, which abandons its processes after a second SIGINT
#: within 5 s.
_FORWARD_SIGINT_AFTER_S = 6.0


@dataclass(frozen=True)
class TrainingContext:
    """What is known about a training before it runs.

    Attributes:
        classes: The parameters of each class of the strategy.
        loss_prediction: Prediction of the loss in its first windows.
        expected_step_s: Seconds of a step, as measured by tuning; 0: unknown.
    """

    classes: Classes = field(default_factory=dict)
    loss_prediction: LossPrediction = LossPrediction()
    expected_step_s: float = 0.0


@dataclass(frozen=True)
class RunReport(Record):
    """The report of rank 0 on a run of a recurring job.

    Attributes:
        metric: The metric that the script reported, larger is better; ``None`` without one.
        loss: Mean of the last training losses; ``None`` if none was observed.
        samples: Samples of all ranks together; 0 if they could not be counted.
        steps: Steps of rank 0.
        fell_back: Whether the loss guard switched the run to exact steps.
        without_barrier: Whether ranks made steps without a barrier.
        resumed: Whether an optimizer has loaded a checkpoint before the first step.
    """

    metric: Real | None = None
    loss: Real | None = None
    samples: int = 0
    steps: int = 0
    fell_back: bool = False
    without_barrier: bool = False
    resumed: bool = False

    @classmethod
    def read(cls, folder: str) -> RunReport | None:
        """Return the report in ``folder``; ``None`` if there is none."""
        try:
            return cls.from_json(json.loads(Path(folder, OUTCOME_FILE).read_text()))
        except (OSError, ValueError, RecursionError):
            return None


@dataclass(frozen=True)
class _FallbackReport(Record):
    """What a rank reports of a fallback of the loss guard.

    Attributes:
        step: The step.
        reason: The reason, for people.
    """

    step: int
    reason: str


@dataclass(frozen=True)
class RunOutcome:
    """How a training ended.

    Attributes:
        status: The exit status of ``horovodrun``; 128 plus the number of the signal, if one ended
            or stopped it.
        drift: Rank 0's report of drift, if rank 0 is on this host; else empty.
        report: Rank 0's report on a run of a recurring job, if rank 0 is on this host.
        stopped: Whether a signal stopped it, such as Ctrl-C.
        refusal: Why its ranks ended it, as it cannot be tuned in its own steps; else empty.
        begun: Whether rank 0 of a training that is tuned live has begun to be tuned, as far as this
            is known on this host.
        resumed: Whether the script of a training that is tuned live has gone on from a checkpoint,
            as far as this is known on this host.
        study: Id of the study that has tuned a training live, if it is known on this host; else
            empty.
    """

    status: int
    drift: str = ""
    report: RunReport | None = None
    stopped: bool = False
    refusal: str = ""
    begun: bool = True
    resumed: bool = False
    study: str = ""


#: Called once after a fallback of the loss guard, with the step and the reason, in another thread
#: than the one that runs the training.
OnFallback = Callable[[int, str], None]


@dataclass(frozen=True)
class Beginning:
    """Under what a training begins that is tuned live after launched trials.

    Attributes:
        strategy: The strategy.
        judged_by: Id of the study of these trials.
        context: What is known about the training under that strategy.
        on_fallback: As for :func:`run_training`.
    """

    strategy: Strategy
    judged_by: str
    context: TrainingContext
    on_fallback: OnFallback


def run_training(
    job: Job,
    strategy: Strategy,
    context: TrainingContext | None = None,
    *,
    recurring: bool = False,
    on_fallback: OnFallback | None = None,
) -> RunOutcome:
    """Run ``job`` under ``strategy``, attached to this terminal.

    SIGINT, SIGTERM and SIGHUP are forwarded to the job. The job ends if this process ends.

    Args:
        job: The job.
        strategy: Its strategy.
        context: What is known about the training.
        recurring: Whether it is a run of a recurring job, which writes a report.
        on_fallback: Called after a fallback of the loss guard, if a rank is on this host.

    Raises:
        AutosyncError: The job cannot be launched.
    """
    with contextlib.ExitStack() as stack:
        folder = ""
        with contextlib.suppress(OSError):  # without the folder there are no reports
            folder = stack.enter_context(NotesFolder())
        spec = _worker_spec(strategy, context or TrainingContext(), folder, recurring)
        if folder and on_fallback is not None and beyond_horovod(strategy):
            stack.enter_context(_watch_for_fallback(folder, on_fallback))
        status, number = _run(job, strategy, launcher_environment(strategy, spec))
        # Horovod's launcher may lose the status of a rank that it ends: two of its threads wait for
        # it (``terminate_executor_shell_and_children`` in horovod/runner/common/util/
        # safe_shell_exec.py), and the one that comes second takes it for 0. A script that handles
        # the signal ends by itself, but without a specification no rank of it says so.
        by_itself = bool(folder) and Path(folder, ENDED_FILE).exists()
        if number and not status and not by_itself:
            status = 128 + number
        outcome = RunReport.read(folder) if recurring and folder else None
        return RunOutcome(status, _drift(folder), outcome, bool(number))


def run_live_training(
    job: Job,
    variables: Mapping[str, str],
    *,
    may_refuse: bool = False,
    folder: Path | None = None,
    beginning: Beginning | None = None,
) -> RunOutcome:
    """Run ``job``, attached to this terminal, tuned in its own steps.

    Args:
        job: The job. With ``may_refuse`` its rank 0 is on this host.
        variables: The options of the tuning, as environment variables.
        may_refuse: Whether the training ends, with its reason, if it cannot be tuned so. Otherwise
            it goes on untuned.
        folder: Keeps the notes on the training (:mod:`hvd_autosync.util.variables`); ``None``: a
            temporary one.
        beginning: Under what it begins; ``None``: the job as it is.

    Raises:
        AutosyncError: The job cannot be launched.
    """
    strategy = Strategy() if beginning is None else beginning.strategy
    environment = launcher_environment(strategy) | dict(variables)
    environment |= {LIVE_VARIABLE: "1", JOB_VARIABLE: pack(json.dumps(job.to_json()))}
    environment[FOLDER_VARIABLE] = str(Path.cwd())
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # without the folder it cannot refuse
            if folder is None:
                folder = Path(stack.enter_context(NotesFolder()))
            for note in (ENDED_NOTE, RESUMED_NOTE):  # of a start before
                (folder / note).unlink(missing_ok=True)
        if beginning is not None:
            known = beginning.context
            spec = _spec(strategy, known, "" if folder is None else str(folder), recurring=False)
            environment |= {JUDGED_VARIABLE: beginning.judged_by, **worker_environment(spec)}
        if folder is None:
            status, number = _run(job, strategy, environment)
            return RunOutcome(status, stopped=bool(number))
        if beginning is not None:
            stack.enter_context(_watch_for_fallback(str(folder), beginning.on_fallback))
        refusal, stopped = folder / REFUSAL_FILE, folder / _STOPPED_FILE
        environment[STOPPED_VARIABLE] = str(stopped)
        if may_refuse:
            environment[REFUSAL_VARIABLE] = str(refusal)
        status, number = _run(job, strategy, environment, on_signal=stopped.touch)
        reason = read_note(refusal)
        may_have_rank_0 = job.hosts if job.elastic else job.hosts[:1]
        begun = (folder / BEGUN_NOTE).exists() or any(
            host in remote_hosts(job) for host in may_have_rank_0
        )
        if number and not status and not (folder / ENDED_NOTE).exists():
            status = 128 + number  # lost, as in run_training
        drift, resumed = _drift(str(folder)), (folder / RESUMED_NOTE).exists()
        study = read_note(folder / STUDY_NOTE)
    return RunOutcome(
        status,
        drift,
        stopped=bool(number),
        refusal=reason,
        begun=begun,
        resumed=resumed,
        study=study,
    )


def _drift(folder: str) -> str:
    """Return rank 0's report of drift in a folder; empty without one."""
    with contextlib.suppress(OSError):
        return Path(folder, DRIFT_FILE).read_text() if folder else ""
    return ""


@contextlib.contextmanager
def _watch_for_fallback(folder: str, on_fallback: OnFallback) -> Iterator[None]:
    """Call ``on_fallback`` as soon as a rank on this host reports a fallback.

    The folder is polled during the training, because this process may be killed before the end.

    Args:
        folder: The folder for reports of ranks on this host.
        on_fallback: The function to call.
    """
    ended = threading.Event()

    def poll() -> None:
        last = False
        while not last:
            last = ended.wait(_POLL_S)
            with contextlib.suppress(OSError, ValueError, RecursionError):
                text = Path(folder, FALLBACK_FILE).read_text()
                report = _FallbackReport.from_json(json.loads(text))
                on_fallback(report.step, report.reason)
                return

    thread = threading.Thread(target=poll, name="hvd-autosync-fallback", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _run(
    job: Job,
    strategy: Strategy,
    environment: dict[str, str],
    on_signal: Callable[[], None] = lambda: None,
) -> tuple[int, int]:
    """Run the job; return its exit status, and the first signal that arrived meanwhile, or 0.

    Args:
        job: The job.
        strategy: Its strategy.
        environment: Its environment variables.
        on_signal: Called when a signal arrives that ends the job, before it is forwarded.
    """
    stop_if_asked()
    process: subprocess.Popen[bytes] | None = None
    signals = []

    def forward(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        with contextlib.suppress(OSError):  # such as a full disk
            on_signal()
        if process is None:
            raise SystemExit(128 + number)
        if number in signals[:-1]:
            return  # the first one is already scheduled
        to_mpirun = number == signal.SIGINT and _may_be_under_mpi(job, strategy)
        delay_s = _FORWARD_SIGINT_AFTER_S if to_mpirun else _FORWARD_AFTER_S
        if number == signal.SIGINT and not to_mpirun:
            # Horovod's launcher for Gloo handles both signals alike, but during its import SIGINT
            # would end it with a traceback.
            number = signal.SIGTERM
        timer = threading.Timer(delay_s, _send, [process, number])
        timer.daemon = True
        timer.start()

    def pass_on(number: int, frame: FrameType | None) -> None:
        if process is not None:
            _send(process, number)

    previous = {}
    if _may_be_under_mpi(job, strategy):  # mpirun sends them to the ranks, which may save then
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            previous[number] = signal.signal(number, pass_on)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            previous[number] = signal.signal(number, forward)
    try:
        process = launch(job, strategy, environment)
        status = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if status and signals:
        status = 128 + signals[0]
    return status if status >= 0 else 128 - status, signals[0] if signals else 0


def _may_be_under_mpi(job: Job, strategy: Strategy) -> bool:
    """Return whether ``mpirun`` may carry the job; true if nobody has looked at Horovod yet."""
    chosen = strategy.get("controller", job.controller)
    if chosen is None:
        return not job.elastic and known_controllers() != ["gloo"]
    return chosen != "gloo"


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a launcher, or the ``mpirun`` that has replaced it, if it still runs."""
    with contextlib.suppress(ProcessLookupError):  # it ends now
        process.send_signal(number)


def _worker_spec(
    strategy: Strategy, context: TrainingContext, folder: str, recurring: bool
) -> TrialSpec | None:
    """Return the specification for the workers; ``None`` if they have nothing to do or to watch."""
    spec = _spec(strategy, context, folder, recurring=recurring)
    return spec if beyond_horovod(strategy) or spec.watched or recurring else None


def _spec(
    strategy: Strategy, context: TrainingContext, folder: str, *, recurring: bool
) -> TrialSpec:
    return TrialSpec(
        TRAINING,
        strategy,
        warmup_steps=0,
        measured_steps=0,
        classes=context.classes,
        loss_prediction=context.loss_prediction,
        expected_step_s=context.expected_step_s,
        driver_folder=folder,
        summarized=recurring,
    )
