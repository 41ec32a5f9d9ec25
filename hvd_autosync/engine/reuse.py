"""Results of finished studies of the same task, which a new study takes over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvd_autosync.errors import SpaceError, TraceFormatError
from hvd_autosync.study.budget import FEWEST_TRIALS
from hvd_autosync.study.confirm import MIN_ROUNDS
from hvd_autosync.study.stage_budget import explored
from hvd_autosync.study.values import Conclusion, StudySettings
from hvd_autosync.traces import StudyRecord, TraceStore

#: A finished study of the same task is reused if the step times of the default differ by at most
#: this factor.
_SAME_SPEED = 1.3


def of_same_task(
    store: TraceStore, study: StudyRecord, default_s: float, on_notice: Callable[[str], None]
) -> Conclusion | None:
    """Return the conclusion that a finished study of the same task has for this one.

    Args:
        store: The store of both.
        study: The study; its task and space are set.
        default_s: Step time of its default, seconds.
        on_notice: Receives a line about a study that cannot be read.

    Returns:
        ``None`` if no such study is known or has shown anything, or its winner may be wrong for
        this job.
    """
    task, space = study.task, study.space
    assert task is not None and space is not None, "the default trial has ended"
    try:
        hours = StudySettings.from_json(study.settings).expected_hours
        studies = store.finished_of_task(task.fingerprint, space.key)
        known, earlier = _newest(store, studies, hours)
    except (TraceFormatError, SpaceError) as error:  # it may be of another job
        on_notice(f"{error.message}; its winner is not reused")
        return None
    if known is None or earlier is None or known.drift or known.fallbacks:
        return None
    if not task.model.parameters:
        return None  # without a profile, all jobs on this cluster would match
    if not space.is_exact(earlier.winner):
        return None  # it was judged by the losses of another training
    if not 1 / _SAME_SPEED <= earlier.default_s / default_s <= _SAME_SPEED:
        return None
    return Conclusion(
        earlier.winner,
        f"study {known.study_id} found it for the same model and cluster",
        "this task was tuned before",
        default_s,
        earlier.comparisons,
        source=earlier.source or known.study_id,
    )


def _newest(
    store: TraceStore, studies: Sequence[StudyRecord], expected_hours: float
) -> tuple[StudyRecord | None, Conclusion | None]:
    """Return the first study that has shown something, with its conclusion.

    One that kept the default because its trials or minutes had ended before, or the training was
    to end sooner than this one, says nothing of what the task can gain.

    Raises:
        TraceFormatError: Its conclusion is damaged.
        SpaceError: Its winner lies in no space of its own.
    """
    for study in studies:
        conclusion = Conclusion.of(study)
        if conclusion is None or study.space is None:
            continue
        if is_conclusive(store, study, expected_hours):
            return study, conclusion
        if kept_for_shorter(study, expected_hours) and _has_explored(store, study):
            break  # it did not find the winners of older ones again
    return None, None


def is_conclusive(store: TraceStore, study: StudyRecord, expected_hours: float) -> bool:
    """Return whether a finished study says what the task can gain, also if it kept its default.

    Args:
        store: The store of its trials.
        study: The study.
        expected_hours: Expected hours of the training of now; 0: unknown.

    Raises:
        TraceFormatError: A trial of it, or its conclusion, is damaged.
        SpaceError: Its winner lies in no space of its own.
    """
    if not _kept_default(study):
        return True
    conclusion = Conclusion.of(study)
    comparisons = conclusion.comparisons if conclusion is not None else ()
    unfinished = any(c.rounds < MIN_ROUNDS and c.speedup > 1 for c in comparisons)
    if unfinished or kept_for_shorter(study, expected_hours):
        return False
    if comparisons or (conclusion is not None and conclusion.source):
        return True
    return _has_explored(store, study)


def kept_for_shorter(study: StudyRecord, expected_hours: float) -> bool:
    """Return whether a study confirmed nothing, and was to pay off in a shorter training.

    Where no knob can matter more hours change nothing.

    Args:
        study: The finished study.
        expected_hours: Expected hours of the training of now.

    Raises:
        TraceFormatError: Its conclusion is damaged.
        SpaceError: Its winner lies in no space of its own.
    """
    conclusion = Conclusion.of(study)
    if conclusion is None or conclusion.comparisons or not _kept_default(study):
        return False
    if study.space is not None and not study.space.knobs:
        return False
    return StudySettings.from_json(study.settings).expected_hours < expected_hours


def _has_explored(store: TraceStore, study: StudyRecord) -> bool:
    return len(explored(store.trials(study.study_id))) >= FEWEST_TRIALS


def _kept_default(study: StudyRecord) -> bool:
    space, winner = study.space, study.winner
    return space is not None and winner is not None and space.complete(winner) == space.default
