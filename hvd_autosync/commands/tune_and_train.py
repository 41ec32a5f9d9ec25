"""``horovodrun --autosync --autosync-mode launched``: tune, then train, also if tuning ends early.

A job that was tuned before is only trained; one that is too short to be tuned runs unchanged. The
first Ctrl-C ends the tuning and starts the training under the best confirmed strategy, or unchanged
without one; the second stops everything. If no training follows, the first Ctrl-C stops everything.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from hvd_autosync.engine.options import Options
from hvd_autosync.errors import ShortJobError, StoreError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.masking import redact
from hvd_autosync.launch.signals import go_on, stop
from hvd_autosync.search_space import Strategy
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.print_line import print_line
from hvd_autosync.util.printable import shell_line

if TYPE_CHECKING:
    from hvd_autosync.engine.training import TrainingContext
    from hvd_autosync.study.study import AskTellStudy
    from hvd_autosync.traces import StudyRecord

_PREFIX = "hvd-autosync"
#: Runs the training after a finished study of the job, and prints the result again after it;
#: returns its exit status.
Train: TypeAlias = "Callable[[Job, Options, StudyRecord, str], int]"


def tune_and_train(job: Job, options: Options, train: Train | None = None) -> int:
    """Tune ``job`` and run it under the strategy that was found.

    Args:
        job: The job.
        options: The options of its tuning.
        train: Runs the training; ``None``: :func:`train_fixed`.

    Returns:
        The exit status of the training, or 0 after tuning only.

    Raises:
        AutosyncError: The job fails under the default strategy, or a setting is invalid.
        KeyboardInterrupt: Ctrl-C; twice if a training follows.
    """
    from hvd_autosync.engine.mode import is_tuned

    trains = not options.tune_only
    command = shell_line(redact(job.command))
    ctrl_c = "ends tuning and starts the training, twice stops" if trains else "stops"
    tuned = options.reuse == "only" or is_tuned(job, options)
    if not tuned:
        ranks = amount(job.world_size, "rank")
        print_line(f"tuning {command} on {ranks}; Ctrl-C {ctrl_c}")
    presses = _Presses()
    try:
        with presses:
            record = _tuned(job, options)
    except ShortJobError as error:
        if not trains:
            raise
        return _run_untuned(job, error)
    except KeyboardInterrupt as end:
        if tuned or not trains or presses.count > 1:
            raise
        return _run_so_far(job, options, getattr(end, "study", None))
    if trains and presses.count > 1:  # the second one came as the tuning ended
        raise KeyboardInterrupt
    return _run_winner(job, options, record, train or train_fixed)


class _Presses:
    """Context manager that counts Ctrl-C."""

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = signal.SIG_IGN

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before != signal.SIG_IGN:  # as in the background of a shell
            signal.signal(signal.SIGINT, self._take)

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        if self.count:
            go_on()

    def _take(self, number: int, frame: FrameType | None) -> NoReturn:
        self.count += 1
        stop(KeyboardInterrupt())


def _tuned(job: Job, options: Options) -> StudyRecord:
    # Imported late: the learner's libraries take seconds to load.
    from hvd_autosync.engine.tuning import tune
    from hvd_autosync.reporting import progress_listener

    with closing(progress_listener()) as listener:
        return tune(job, options, listener, trains=not options.tune_only)


def _run_winner(job: Job, options: Options, record: StudyRecord, train: Train) -> int:
    """Run the training under the winner of a finished study, unless only tuning was requested."""
    from hvd_autosync.reporting import closing_lines

    answer, trace = closing_lines(record, options.store)
    print_line(answer)
    status = 0
    if not options.tune_only:
        assert record.winner is not None, "a finished study has a winner"
        status = train(job, options, record, answer)
    print_line(trace)
    return status


def _run_so_far(job: Job, options: Options, study: AskTellStudy | None) -> int:
    """Run the training after Ctrl-C has ended the tuning.

    Args:
        job: The job.
        options: The options of its tuning.
        study: The study; ``None`` if it had not begun.
    """
    if study is None:
        print_line("tuning was ended before its first trial: the training runs unchanged")
        return _run_unchanged(job)
    from hvd_autosync.engine.training_context import training_context
    from hvd_autosync.reporting import closing_lines, ended_line

    try:
        record = replace(study.record, winner=study.proven or Strategy())
        answer = ended_line(study)
        context = training_context(record, options.store)
    except StoreError as error:
        print_line(f"tuning was ended, and its trials cannot be read: {error.message}")
        print_line(f"the training runs unchanged; run the same command again to {options.again}")
        return _run_unchanged(job)
    print_line(answer)
    status = train_under_winner(job, options, record, context, answer)
    trace = closing_lines(record, options.store)[1]
    print_line(f"{trace}; run the same command again to {options.again}")
    return status


def train_fixed(job: Job, options: Options, record: StudyRecord, answer: str) -> int:
    """Run the training under the winner of ``record``; print ``answer`` again after it."""
    from hvd_autosync.engine.training_context import training_context

    context = training_context(record, options.store)
    return train_under_winner(job, options, record, context, answer)


def train_under_winner(
    job: Job, options: Options, record: StudyRecord, context: TrainingContext, answer: str = ""
) -> int:
    """Run the training of a study's job under its winner, and record there what it shows of that.

    Args:
        job: The job.
        options: The options, with the store that has the study.
        record: The study.
        context: What is known about the training.
        answer: Printed after it.

    Returns:
        The exit status of the training.
    """
    from hvd_autosync.engine.kept_fallbacks import KeptFallbacks
    from hvd_autosync.engine.training import run_training

    strategy = record.winner or Strategy()
    kept = KeptFallbacks(record, options)
    ended = run_training(job, strategy, context, on_fallback=kept.keep)
    if answer and not ended.stopped:
        print_line(answer)
    for line in kept.lines(job):
        print_line(line)
    if ended.drift:
        print_line(tell_drift(record, options, ended.drift))
    return ended.status


def _run_untuned(job: Job, error: ShortJobError) -> int:
    """Run a job that is too short to be tuned unchanged."""
    print_line(f"{error.message}; it runs untuned. {error.hint}")
    return _run_unchanged(job)


def _run_unchanged(job: Job) -> int:
    from hvd_autosync.engine.training import run_training

    return run_training(job, Strategy()).status


def tell_drift(study: StudyRecord, options: Options, drift: str) -> str:
    """Record in the store a drift of steps; return the message.

    Args:
        study: The study under whose winner they drifted.
        options: The options, with the store.
        drift: The report, for people.
    """
    from hvd_autosync.engine.live_stage import keep_drift

    try:
        if keep_drift(study, options, drift):
            return "the step time has changed for good; the next run tunes again"
    except StoreError as error:
        return (
            f"the step time has changed for good; this could not be recorded in the store: {error}"
        )
    return (
        "this job was already tuned again because its step time had changed; to tune once more: "
        "--autosync-reuse never"
    )
