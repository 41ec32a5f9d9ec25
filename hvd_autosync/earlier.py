"""What earlier studies of the same command know of its job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvd_autosync.errors import StoreError
from hvd_autosync.launch.job import Job, redact
from hvd_autosync.quality import loss_ceilings, losses_of
from hvd_autosync.search_space import ModelProfile
from hvd_autosync.search_space.exchange_plan import parameter_classes
from hvd_autosync.study_values import Conclusion
from hvd_autosync.traces import StudyRecord, TraceStore
from hvd_autosync.training import Known


def known_of(study: StudyRecord, location: str | None, job: Job) -> Known:
    """What the finished study of ``job`` and earlier ones know of its training.

    Args:
        study: The study whose winner it runs under.
        location: Of the store, as the user named it.
        job: The job.
    """
    conclusion = Conclusion.of(study)
    best = conclusion.best if conclusion is not None else None
    default_s = conclusion.default_s if conclusion is not None else 0.0
    expected_s = default_s / best.speedup if best is not None else default_s
    return Known(
        parameter_classes(study.task.model) if study.task is not None else {},
        known_ceilings(location, redact(job.command), job.world_size),
        expected_s if expected_s > 0 else 0.0,
    )


def note_drift(location: str | None, study: StudyRecord, said: Sequence[str]) -> None:
    """Write down that the training under a study's winner became slower.

    Args:
        location: Of the store, as the user named it.
        study: The study.
        said: By whom and why, one sentence each.
    """
    TraceStore(location).keep_drift(study.study_id, said)


def known_model(location: str | None, command: Sequence[str]) -> ModelProfile | None:
    """The model of the newest study of ``command``; ``None`` without one, or without a store.

    Args:
        location: Of the store, as the user named it.
        command: The training's command, as studies keep it.
    """
    try:
        newest = next(_newest_first(TraceStore(location), command), None)
    except StoreError:
        return None  # the job needs no store
    return newest.task.model if newest is not None and newest.task is not None else None


def known_ceilings(
    location: str | None, command: Sequence[str], world_size: int
) -> tuple[float, ...]:
    """The losses that exact trainings of ``command`` stay below, by windows of steps.

    From the newest study on as many ranks in which lossy strategies were judged; none without one.

    Args:
        location: Of the store, as the user named it.
        command: The training's command, as studies keep it.
        world_size: Number of ranks.
    """
    try:
        store = TraceStore(location)
        for study in _newest_first(store, command):
            if study.task is None or study.task.resources.world_size != world_size:
                continue
            if found := loss_ceilings(_default_losses(store, study)):
                return found
    except StoreError:
        pass
    return ()


def _newest_first(store: TraceStore, command: Sequence[str]) -> Iterator[StudyRecord]:
    line = tuple(command)
    known = [s for s in store.studies() if s.task is not None and s.command[-len(line) :] == line]
    return iter(sorted(known, key=lambda study: study.created_at, reverse=True))


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
