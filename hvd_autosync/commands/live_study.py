"""The helper process of a training that is tuned live; its rank 0 starts it.

Messages travel over standard input and output (:mod:`hvd_autosync.runtime.live.helper`); lines for
the user go to the error output, which is that of rank 0.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from hvd_autosync.engine.forwarding import ForwardingListener
from hvd_autosync.errors import AutosyncError, LiveTuningError
from hvd_autosync.runtime.live.notes import has_note, leave_note
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.log import start_log
from hvd_autosync.util.print_line import print_line
from hvd_autosync.util.variables import (
    END_TUNING_NOTE,
    JUDGED_VARIABLE,
    STOPPED_VARIABLE,
    STUDY_NOTE,
    TUNING_ENDED_NOTE,
)

if TYPE_CHECKING:
    from io import TextIOWrapper

    from hvd_autosync.engine.live import Cost
    from hvd_autosync.engine.tuning import Listener
    from hvd_autosync.launch.live_runner import Training
    from hvd_autosync.study.study import AskTellStudy
    from hvd_autosync.traces import StudyRecord

#: Longest time of this process after the end of the training, seconds: its error output is that of
#: rank 0, whose launcher waits for its end.
_LONGEST_S = 20.0
#: The same in an elastic job, whose other ranks wait meanwhile; and that to let go of the study.
_LONGEST_ELASTIC_S, _LET_GO_S = 1.0, 1.0
#: The message of this process to itself that the learner's libraries are loaded.
_LOADED = "loaded"


def main() -> None:
    """Tune the training whose rank 0 has started this process; end with it."""
    _ignore_warnings_of_schedulers()
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        # Gloo's launcher reads UTF-8 whatever the locale, and passes nothing on after other bytes.
        cast("TextIOWrapper", sys.stderr).reconfigure(encoding="utf-8")
    # What libraries print must not reach the messages.
    sent = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    start_log("helper")
    from hvd_autosync.launch.live_runner import Training
    from hvd_autosync.search_space.horovod_settings import is_elastic

    study = _Study()

    def on_end() -> None:
        if is_elastic(os.environ):
            _after(_LONGEST_ELASTIC_S, lambda: _leave(study))
        else:
            _end_soon()

    # Not sys.stdin, which Python closes in the end: while it is being read that is an error.
    received = os.fdopen(os.dup(0), "rb")
    training = Training(received, sent, on_end=on_end, stopped=_watch_for_stop())
    loading = threading.Thread(target=_load, args=(training,), daemon=True)
    try:
        _tune(training, loading, study)
    except LiveTuningError as end:
        if line := _last_line(training, study, end):
            print_line(line)
    except AutosyncError as error:
        tuned = study.begun or study.answer or JUDGED_VARIABLE in os.environ
        known = "under the best strategy that is known" if tuned else "untuned"
        for line in (*str(error).splitlines(), f"the training goes on {known}"):
            print_line(line.strip())
        training.stop(error.message)
    # All is stored and said. Python would take the interpreter and its libraries to pieces, at the
    # lowest priority, while the launcher of rank 0 waits; and one that is being loaded may crash.
    os._exit(0)


@dataclass
class _Study:
    """How far the study of this training has come.

    Attributes:
        begun: Whether there is one in the store.
        answer: What it has found, once it is concluded; empty before.
        resumes: What is said of the next run if the study does not end; empty: nothing.
        let_go: Lets other processes claim it.
    """

    begun: bool = False
    answer: str = ""
    resumes: str = ""
    let_go: Callable[[], None] = lambda: None


def _tune(training: Training, loading: threading.Thread, reached: _Study) -> NoReturn:
    """Tune the training until it ends.

    Args:
        training: The training.
        loading: Loads the learner's libraries; not started yet.
        reached: Is kept up to date.
    """
    from hvd_autosync.engine.live_job import live_job, live_options

    options = live_options()
    if options.reuse != "never":
        reached.resumes = "; the next run of this job resumes it"
    # They take seconds to load: meanwhile the script prepares its training, which may end.
    loading.start()
    received: dict[str, dict[str, Any]] = {}
    while not {"begin", _LOADED} <= received.keys():
        message = training.wait("begin", _LOADED)
        received[message["type"]] = message
    from hvd_autosync.engine.live import LiveStudy
    from hvd_autosync.engine.live_stage import judged_study
    from hvd_autosync.reporting import closing_lines, ended_line, progress_listener
    from hvd_autosync.reporting.live import cost_line
    from hvd_autosync.search_space.horovod_settings import launch_knobs

    def on_switch(study: StudyRecord, cost: Cost) -> None:
        leave_note(STUDY_NOTE, study.study_id)  # it may be one that was not begun here
        reached.answer, trace = closing_lines(study, options.store)
        for line in (reached.answer, trace, cost_line(study, cost)):
            if line:
                print_line(line)

    def on_end(study: AskTellStudy, earlier: StudyRecord | None) -> None:
        reached.answer = f"{ended_line(study, earlier)}{reached.resumes}"
        print_line(reached.answer)
        leave_note(TUNING_ENDED_NOTE, reached.answer)

    def ends() -> bool:
        return has_note(END_TUNING_NOTE)

    begin = received["begin"]
    with closing(progress_listener()) as listener:
        job = live_job(begin)  # which loads extensions
        fixed = launch_knobs(reinitializes=begin["reinitializes"])
        LiveStudy(
            training,
            job,
            options,
            _Noted(listener, reached),
            fixed,
            on_switch,
            ends,
            on_end,
            judged_study(options),
            adds_levels=begin["adds_levels"],
        ).run()


class _Noted(ForwardingListener):
    """Notes, too, which study has begun, for a notebook and the end."""

    def __init__(self, display: Listener, reached: _Study) -> None:
        super().__init__(display)
        self._reached = reached

    def on_study_start(self, study: AskTellStudy, *, resumed: bool) -> None:
        """See :class:`hvd_autosync.engine.tuning.Listener`."""
        leave_note(STUDY_NOTE, study.study_id)
        self._reached.begun = True
        self._reached.let_go = lambda: study.store.let_go(study.study_id)
        self._listener.on_study_start(study, resumed=resumed)


def _load(training: Training) -> None:
    """Load the learner's libraries, then say so."""
    with suppress(Exception):  # it is raised where they are used
        import hvd_autosync.engine.live
        import hvd_autosync.reporting.live  # noqa: F401
    training.tell_self(_LOADED)


def _last_line(training: Training, study: _Study, end: LiveTuningError) -> str:
    """Return what is said of a training that has ended; empty if nothing more is to be said."""
    from hvd_autosync.launch.live_runner import TrainingEnded, TrainingHung, TrainingLost

    if not isinstance(end, TrainingEnded | TrainingLost):
        return ""  # rank 0 has said why
    if study.answer:  # again, below what the training has printed since
        return study.answer if isinstance(end, TrainingEnded) else ""
    if isinstance(end, TrainingLost) and not training.stopped:
        # Before the study the job's own messages say more.
        return end.message if study.begun or isinstance(end, TrainingHung) else ""
    if isinstance(end, TrainingLost) or training.results:
        return f"the training ended before its tuning{study.resumes}" if study.begun else ""
    if not training.steps:
        return (
            "nothing was tuned: all ranks together made no step of an optimizer that "
            "hvd.DistributedOptimizer has wrapped. A script that reduces gradients by hand calls "
            "hvd_autosync.step() after each step"
        )
    steps = amount(training.steps, "step")
    ended = f"the training ended after {steps}, before its default was measured"
    if judged := os.environ.get(JUDGED_VARIABLE):
        return (
            f"it has kept the winner of study {judged} and was not tuned in its own steps: {ended}"
        )
    return (
        f"nothing was tuned: {ended}. To tune a job that is run as shortly as this many times: "
        "--autosync-mode launched --autosync-expected-hours H, with the hours of all its runs"
    )


def _ignore_warnings_of_schedulers() -> None:
    """Ignore signals that are for the script.

    A scheduler may send them to all processes of a job some time before it ends that: the script
    saves a checkpoint, and this process, which has nothing to save, would die of them.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _watch_for_stop() -> Callable[[], bool]:
    """Return whether the job has been stopped from outside since.

    The flag says so by a file. A scheduler sends its signal to every process of the job, which is
    what tells it from a launcher: one that ends the other ranks after a failure does not know of
    this process.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        _end_soon()

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, receive)
    marker = os.environ.get(STOPPED_VARIABLE, "")
    return lambda: bool(received) or bool(marker and Path(marker).exists())


def _end_soon() -> None:
    """Nobody listens any more, or soon nobody will: end, also in the middle of a calculation."""
    _after(_LONGEST_S, lambda: os._exit(0))


def _leave(study: _Study) -> None:
    """End now, and let go of the study if that is quick: another host cannot see this end."""
    _after(_LET_GO_S, lambda: os._exit(0))
    try:
        study.let_go()
    finally:
        os._exit(0)


def _after(seconds: float, function: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
