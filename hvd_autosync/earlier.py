"""What earlier studies know of a job that is about to run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hvd_autosync.errors import StoreError
from hvd_autosync.quality import loss_ceilings, losses_of
from hvd_autosync.search_space import ModelProfile
from hvd_autosync.search_space.exchange_plan import parameter_classes
from hvd_autosync.study_values import Conclusion
from hvd_autosync.traces import StudyRecord, TraceStore
from hvd_autosync.training import Known


def known_of(study: StudyRecord, location: str | None) -> Known:
    """What the finished study of a job knows of its training, and earlier ones of the same job.

    Args:
        study: The study whose winner it runs under.
        location: Of the store, as the user named it.
    """
    conclusion = Conclusion.of(study)
    expected_s = conclusion.winner_s if conclusion is not None else 0.0
    return Known(
        parameter_classes(study.task.model) if study.task is not None else {},
        known_ceilings(location, {study.job_key}),
        expected_s if expected_s > 0 else 0.0,
    )


def known_model(location: str | None, command: Sequence[str]) -> ModelProfile | None:
    """The model of the newest study of ``command``; ``None`` without one, or without a store.

    Args:
        location: Of the store, as the user named it.
        command: The training's command, as studies keep it.
    """
    line = tuple(command)
    try:
        studies = TraceStore(location).studies()
    except StoreError:
        return None  # the job needs no store
    known = [s for s in studies if s.task is not None and s.command[-len(line) :] == line]
    newest = max(known, key=lambda study: study.created_at, default=None)
    return newest.task.model if newest is not None and newest.task is not None else None


def known_ceilings(location: str | None, job_keys: Collection[str]) -> tuple[float, ...]:
    """The losses that exact trainings of a job stay below, by windows of steps.

    From its newest study in which lossy strategies were judged; none without one.

    Args:
        location: Of the store, as the user named it.
        job_keys: Of the job's studies (``StudyRecord.job_key``).
    """
    try:
        store = TraceStore(location)
        studies = [study for study in store.studies() if study.job_key in job_keys]
        for study in sorted(studies, key=lambda each: each.created_at, reverse=True):
            if found := loss_ceilings(_default_losses(store, study)):
                return found
    except StoreError:
        pass  # the job needs no store
    return ()


def _default_losses(store: TraceStore, study: StudyRecord) -> list[tuple[float, ...]]:
    """Losses of each trial of the default that judged others."""
    if study.space is None:
        return []
    default = study.space.default
    return [
        losses
        for trial in store.trials(study.study_id)
        if trial.kind == "quality" and trial.result is not None
        if study.space.complete(trial.strategy) == default and (losses := losses_of(trial.result))
    ]
