"""What earlier studies know of a job that is about to run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hvd_autosync.engine.training import TrainingContext
from hvd_autosync.errors import SpaceError, StoreError
from hvd_autosync.search_space import ModelProfile, Strategy
from hvd_autosync.search_space.exchange_plan import parameter_classes
from hvd_autosync.search_space.trial import LossPrediction
from hvd_autosync.study.loss_prediction import predict_losses
from hvd_autosync.study.quality import losses_of
from hvd_autosync.study.values import Conclusion, StudySettings
from hvd_autosync.traces import StudyRecord, TraceStore


def training_context(study: StudyRecord, location: str | TraceStore | None) -> TrainingContext:
    """What the finished study of a job knows of its training, and earlier ones of the same job.

    Where another study has found its winner, that one's losses count as well.

    Args:
        study: The study whose winner it runs under.
        location: The store, or where it is, as the user named it.
    """
    conclusion = Conclusion.of(study)
    expected_s = conclusion.winner_s if conclusion is not None else 0.0
    keys = {study.job_key, *source_key(conclusion, location)}
    return TrainingContext(
        parameter_classes(study.task.model) if study.task is not None else {},
        predicted_losses(location, keys, study.winner or Strategy()),
        expected_s if expected_s > 0 else 0.0,
    )


def source_key(conclusion: Conclusion | None, location: str | TraceStore | None) -> tuple[str, ...]:
    """The job of the study that found the winner, where it was taken over and is still known."""
    if conclusion is None or not conclusion.source:
        return ()
    try:
        return (_store(location).study(conclusion.source).job_key,)
    except StoreError:
        return ()


def _store(location: str | TraceStore | None) -> TraceStore:
    return location if isinstance(location, TraceStore) else TraceStore(location)


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


def predicted_losses(
    location: str | TraceStore | None, job_keys: Collection[str], strategy: Strategy
) -> LossPrediction:
    """The losses of a healthy training of a job, by windows of steps.

    From its newest study in which lossy strategies were judged; without windows if there is none.

    Args:
        location: The store, or where it is, as the user named it.
        job_keys: Of the job's studies (``StudyRecord.job_key``).
        strategy: What the training runs under.
    """
    try:
        store = _store(location)
        studies = [study for study in store.studies() if study.job_key in job_keys]
        for study in sorted(studies, key=lambda each: each.created_at, reverse=True):
            if study.space is None:
                continue
            own = _losses(store, study, strategy) if _may_be_used(study, strategy) else []
            default = _losses(store, study, study.space.default)
            tolerance = StudySettings.from_json(study.settings).loss_tolerance
            found = predict_losses(default, own, tolerance)
            if found.levels:
                return found
    except StoreError:
        pass  # the job needs no store
    return LossPrediction()


def _may_be_used(study: StudyRecord, strategy: Strategy) -> bool:
    """Whether a study has found that ``strategy`` may be used."""
    conclusion = Conclusion.of(study)
    verdicts = () if conclusion is None else conclusion.verdicts
    return any(v.admissible and _same(study, v.strategy, strategy) for v in verdicts)


def _losses(store: TraceStore, study: StudyRecord, strategy: Strategy) -> list[tuple[float, ...]]:
    """Losses of each trial under ``strategy`` that judged."""
    return [
        losses
        for trial in store.trials(study.study_id)
        if trial.kind == "quality" and trial.result is not None
        if _same(study, trial.strategy, strategy) and (losses := losses_of(trial.result))
    ]


def _same(study: StudyRecord, one: Strategy, other: Strategy) -> bool:
    """Whether two strategies train the same model; not where one is outside of the space."""
    assert study.space is not None, "a study that judged knows its space"
    try:
        return study.space.lossy_part(one) == study.space.lossy_part(other)
    except SpaceError:
        return False
