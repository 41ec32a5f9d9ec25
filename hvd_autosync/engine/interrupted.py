"""Earlier studies of a job: interrupted ones are resumed or superseded, finished ones reused."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping

from hvd_autosync.engine.compatibility import why_not_resumed
from hvd_autosync.errors import StoreError
from hvd_autosync.search_space.knobs import Value
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore
from hvd_autosync.traces.unsaved import take_unsaved
from hvd_autosync.util.variables import RESTARTED_VARIABLE

_NEVER = "is not resumed under --autosync-reuse never"
#: Name of a store -> studies of it that tunings of this process have left and could not let go.
_LEFT: dict[str, set[str]] = {}


def let_go(store: TraceStore, study_id: str) -> None:
    """Let other tunings claim a study, also one of this process, which may live on.

    If the store cannot be used, the next tuning of this process that uses it does that first.

    Args:
        store: The store.
        study_id: The study, whose tuning has ended.
    """
    try:
        store.let_go(study_id)
    except StoreError:
        _LEFT.setdefault(store.name, set()).add(study_id)


def last_finished(store: TraceStore, key: str, *, from_scratch: bool) -> StudyRecord | None:
    """Return the last finished study of a job, if its result may be used.

    Args:
        store: The store.
        key: Key of the job's studies.
        from_scratch: As for :func:`claim_interrupted`.

    Raises:
        StoreError: The store cannot be read.
    """
    if from_scratch and not os.environ.get(RESTARTED_VARIABLE):
        return None
    known = store.find_finished(key)
    return None if known is None or (from_scratch and not _is_of_this_training(known)) else known


def _is_of_this_training(study: StudyRecord) -> bool:
    """Return whether a study is that of this training, which was started again."""
    return study.study_id == os.environ.get(RESTARTED_VARIABLE)


def claim_interrupted(
    store: TraceStore,
    key: str,
    settings: StudySettings,
    on_notice: Callable[[str], None],
    fixed: Collection[str],
    unwanted: Mapping[str, Collection[Value]],
    *,
    from_scratch: bool,
) -> StudyRecord | None:
    """Return the interrupted study of a job that is resumed; ``None``: a new one begins.

    A study that cannot be resumed ends as failed.

    Args:
        store: The store.
        key: Key of the job's studies.
        settings: The settings of now.
        on_notice: Receives messages for the user.
        fixed: Knobs that cannot be changed now.
        unwanted: Choices of knobs that shall not be tried now.
        from_scratch: Whether none is resumed, but one of this training, which was started again.
            What the key does not contain, such as modules and data, may have changed, and trials of
            two trainings must not be compared.

    Raises:
        StoreError: The store cannot be used.
    """
    left = _LEFT.get(store.name, set())
    for study_id in sorted(left):
        store.let_go(study_id)
        left.discard(study_id)
    while (record := store.claim_resumable(key)) is not None:
        never = from_scratch and not _is_of_this_training(record)
        why = _NEVER if never else why_not_resumed(record, settings, fixed, unwanted)
        if not why:
            for number in take_unsaved(store, record.study_id):
                on_notice(f"the store has taken the result of trial {number} from a file")
            trials = store.trials(record.study_id)
            told = [trial for trial in trials if trial.kind == "default" and trial.result]
            if not told or any(trial.step_time is not None for trial in told):
                return record
            # Its driver was lost before it had ended the study; the job may be another now.
            why = "has no step time of its default"
        superseded = {"reason": f"it was interrupted, and {why}"}
        store.finish(record.study_id, StudyStatus.FAILED, superseded, None)
        on_notice(
            f"starting a new study: the interrupted study {record.study_id} of this job {why}; its "
            "trials stay in the store"
        )
        if not from_scratch:
            break
    return None
