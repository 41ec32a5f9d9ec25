"""``horovodrun --autosync``: tune, then train, also where the tuning does not come to its end.

A job that is too short to be tuned runs as it is. Ctrl-C ends the tuning and starts the training
with what was confirmed by then, else as it is; a second one stops everything. Where no training
follows, the first one stops already.
"""

from __future__ import annotations

import signal
import sys
from contextlib import closing
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from hvd_autosync.engine.options import Options
from hvd_autosync.errors import ShortJobError, StoreError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.masking import redact
from hvd_autosync.search_space import Strategy
from hvd_autosync.util.printable import printable, shell_line

if TYPE_CHECKING:
    from hvd_autosync.study.study import Study
    from hvd_autosync.traces import StudyRecord

_PREFIX = "hvd-autosync"


def tune_and_train(job: Job, options: Options) -> int:
    """Tune ``job`` and run it with what was found.

    Returns:
        The exit status of the training, or 0 after tuning only.

    Raises:
        AutosyncError: The job cannot be tuned and fails as it is, or something cannot be used.
        KeyboardInterrupt: Ctrl-C, twice where a training follows.
    """
    trains = not options.tune_only
    command = shell_line(redact(job.command))
    ctrl_c = "ends it and starts the training, twice stops" if trains else "stops"
    _say(f"tuning {command} on {job.world_size} ranks; Ctrl-C {ctrl_c}")
    presses = _Presses()
    try:
        with presses:
            record = _tuned(job, options)
    except ShortJobError as error:
        if not trains:
            raise
        return _run_untuned(job, error)
    except KeyboardInterrupt as end:
        if not trains or presses.count > 1:
            raise
        return _run_so_far(job, options, getattr(end, "study", None))
    return _run_winner(job, options, record)


class _Presses:
    """Counts Ctrl-C while it is entered, so that two can be told from one."""

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = signal.SIG_IGN

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before != signal.SIG_IGN:  # as in the background of a shell
            signal.signal(signal.SIGINT, self._take)

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _take(self, number: int, frame: FrameType | None) -> NoReturn:
        self.count += 1
        raise KeyboardInterrupt


def _tuned(job: Job, options: Options) -> StudyRecord:
    # The learner's libraries take seconds to load; nothing of the job runs meanwhile.
    from hvd_autosync.engine.tuning import tune
    from hvd_autosync.reporting import progress_listener

    with closing(progress_listener()) as listener:
        return tune(job, options, listener, trains=not options.tune_only)


def _run_winner(job: Job, options: Options, record: StudyRecord) -> int:
    """Run the training with the winner of a finished study, where it is wanted."""
    from hvd_autosync.reporting import closing_lines

    answer, trace = closing_lines(record, options.store)
    _say(answer)
    status = 0
    if not options.tune_only:
        assert record.winner is not None, "a finished study has a winner"
        status = _train(job, options, record, answer)
    _say(trace)
    return status


def _run_so_far(job: Job, options: Options, study: Study | None) -> int:
    """Run the training after Ctrl-C has ended the tuning.

    Args:
        job: The job.
        options: Of its tuning.
        study: What was tuned; ``None`` where it had not begun.
    """
    if study is None:
        _say("tuning was ended before its first trial: the training runs as it is")
        return _run_as_it_is(job)
    from hvd_autosync.reporting import closing_lines
    from hvd_autosync.study.knob_order import with_knob_order

    proven = study.proven
    record = replace(study.record, winner=proven or Strategy())
    what = "with nothing confirmed: the training runs as it is"
    if proven is not None:
        space = with_knob_order(study.record, study.history).space or study.space
        what = f"with this confirmed, and the training runs with it: {space.describe(proven)}"
    ended = sum(trial.result is not None for trial in study.history)
    answer = f"tuning was ended after {ended} trial{'s' * (ended != 1)}, {what}"
    _say(answer)
    status = _train(job, options, record, answer)
    _say(f"{closing_lines(record, options.store)[1]}; the same command goes on with it")
    return status


def _train(job: Job, options: Options, record: StudyRecord, answer: str) -> int:
    """Run the training with the winner of ``record``; say ``answer`` again after it."""
    from hvd_autosync.engine.training import run_training
    from hvd_autosync.engine.training_context import training_context

    strategy = record.winner or Strategy()
    kept: list[str] = []

    def keep(step: int, reason: str) -> None:
        kept.append(_keep_fallback(record, options, strategy, step, reason))

    ended = run_training(job, strategy, training_context(record, options.store), on_fallback=keep)
    if not ended.stopped:
        _say(answer)
    for line in kept:
        _say(line)
    if ended.drift:
        _say(_keep_drift(record, options, ended.drift))
    return ended.status


def _run_untuned(job: Job, error: ShortJobError) -> int:
    """Run a job as it is that is too short to be tuned."""
    _say(f"{error.message}; it runs untuned. {error.hint}")
    return _run_as_it_is(job)


def _run_as_it_is(job: Job) -> int:
    from hvd_autosync.engine.training import run_training

    return run_training(job, Strategy()).status


def _keep_fallback(
    study: StudyRecord, options: Options, strategy: Strategy, step: int, reason: str
) -> str:
    """Write down that the loss guard has ended the strategy; what comes of it."""
    from hvd_autosync.traces import Fallback, TraceStore

    what = f"the loss guard has ended this strategy at step {step}"
    try:
        TraceStore(options.store).keep_fallback(study.study_id, Fallback(strategy, step, reason))
    except StoreError as error:
        return f"{what}, which was not written down: {error}"
    return f"{what}: the next run does not use it again"


def _keep_drift(study: StudyRecord, options: Options, drift: str) -> str:
    """Write down that steps became slower; what will be done about it."""
    from hvd_autosync.study.values import StudySettings
    from hvd_autosync.traces import TraceStore

    if StudySettings.from_json(study.settings).anew:  # else it would be searched for ever
        return "it was searched again for that before; once more: --autosync-reuse never"
    try:
        TraceStore(options.store).keep_drift(study.study_id, [drift])
    except StoreError as error:
        return f"that steps became slower was not written down: {error}"
    return "as steps became slower, the next run searches again"


def _say(line: str) -> None:
    print(f"{_PREFIX}: {printable(line)}", file=sys.stderr, flush=True)
