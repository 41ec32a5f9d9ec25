"""The training context of a job, from its earlier studies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from hvd_autosync.engine.training import TrainingContext
from hvd_autosync.errors import SpaceError, StoreError, TraceFormatError
from hvd_autosync.search_space import ModelProfile, Strategy
from hvd_autosync.search_space.exchange_plan import parameter_classes
from hvd_autosync.search_space.trial import LossPrediction, TrialStatus
from hvd_autosync.study.damaged import named_if_damaged
from hvd_autosync.study.loss_prediction import predict_losses
from hvd_autosync.study.quality import QualityCheck
from hvd_autosync.study.quality_trial import QualityTrial, in_every_step, losses_of
from hvd_autosync.study.values import Conclusion, StudySettings
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import StudyRecord, TraceStore
from hvd_autosync.util.versions import other_versions


def training_context(study: StudyRecord, location: str | TraceStore | None) -> TrainingContext:
    """Return the training context from the finished study of a job and earlier ones of it.

    If the winner was reused from another study, or its lossy knobs were judged by one, that study's
    losses are used too. A step time that was measured under other versions of packages may not
    apply here, so it is left out.

    Args:
        study: The study with the winner that the training uses.
        location: The store, or its location as the user named it.
    """
    conclusion = Conclusion.of(study)
    expected_s = conclusion.winner_s if conclusion is not None else 0.0
    if any(other_versions(study.versions)):
        expected_s = 0.0
    others = ("" if conclusion is None else conclusion.source, study.settings.get("judged_by", ""))
    keys = {study.job_key, *(key for each in others for key in source_key(each, location))}
    return TrainingContext(
        parameter_classes(study.task.model) if study.task is not None else {},
        predicted_losses(location, keys, study.winner or Strategy()),
        expected_s if expected_s > 0 else 0.0,
    )


def source_key(study_id: str, location: str | TraceStore | None) -> tuple[str, ...]:
    """Return the job key of a study, if there is one of this id and the store still has it."""
    if not study_id:
        return ()
    try:
        return (_store(location).study(study_id).job_key,)
    except StoreError:
        return ()


def _store(location: str | TraceStore | None) -> TraceStore:
    if isinstance(location, TraceStore):
        return location
    return TraceStore(location, create=False, or_empty=True)


def known_model(location: str | None, command: Sequence[str]) -> ModelProfile | None:
    """Return the model of the newest study of ``command``; ``None`` without a study or a store.

    Args:
        location: Location of the store, as the user named it.
        command: The command of the training, as studies store it.
    """
    line = tuple(command)
    try:
        studies = _store(location).studies(skip_damaged=True)
    except StoreError:
        return None  # the job can run without a store
    own = (s.task for s in studies if s.task is not None and s.command[-len(line) :] == line)
    newest = next(own, None)
    return None if newest is None else newest.model


def predicted_losses(
    location: str | TraceStore | None, job_keys: Collection[str], strategy: Strategy
) -> LossPrediction:
    """Predict the losses of a training of a job, by windows of steps.

    The prediction uses the newest study of the job that has admitted the strategy, or else the
    newest one in which lossy strategies were judged, finished or not. It has no windows if there is
    no such study, or only damaged ones.

    Args:
        location: The store, or its location as the user named it.
        job_keys: Keys of the job's studies (``StudyRecord.job_key``).
        strategy: The strategy of the training.
    """
    try:
        store = _store(location)
        studies = [s for key in job_keys for s in store.studies(job_key=key, skip_damaged=True)]
        known = []
        for study in studies:
            with suppress(TraceFormatError):  # others may be whole
                if study.space is not None:
                    known.append((_admitted(store, study, strategy), study.created_at, study))
        for admitted, _, study in sorted(known, key=lambda each: each[:2], reverse=True):
            assert study.space is not None, "only such studies are known"
            with suppress(TraceFormatError):
                own = _losses(store, study, strategy) if admitted else []
                default = _losses(store, study, study.space.default)
                tolerance = StudySettings.from_json(study.settings).loss_tolerance
                found = predict_losses(default, own, tolerance)
                if found.levels:
                    return found
    except StoreError:
        pass  # the job can run without a store
    return LossPrediction()


def _admitted(store: TraceStore, study: StudyRecord, strategy: Strategy) -> bool:
    """Return whether a study has admitted ``strategy`` in its quality test."""
    conclusion = Conclusion.of(study)
    verdicts = _verdicts(store, study, strategy) if conclusion is None else conclusion.verdicts
    return any(v.admissible and _same(study, v.strategy, strategy) for v in verdicts)


def _verdicts(store: TraceStore, study: StudyRecord, strategy: Strategy) -> Sequence[Verdict]:
    """Return the verdict on ``strategy`` from the trials of a study without a conclusion."""
    assert study.space is not None, "a study with quality trials has a space"
    default = study.space.default
    if _same(study, strategy, default):
        return ()
    settings = StudySettings.from_json(study.settings)
    trials, recorded = [], store.trials(study.study_id)
    for trial in recorded:
        if trial.kind != "quality" or trial.result is None:
            continue
        if trial.result.status is TrialStatus.CUT_SHORT:
            continue
        steps = int(trial.info.get("steps", settings.quality_steps))
        for own in (default, strategy):
            if _same(study, trial.strategy, own):
                seed = int(trial.info["seed"])
                trials.append(QualityTrial.of(own, seed, steps, trial.result))
    check = QualityCheck(
        default,
        [strategy],
        trials,
        lambda untried, verdicts: None,
        steps=settings.quality_steps,
        tolerance=settings.loss_tolerance,
        goal=settings.goal,
        spent="the study has no conclusion",
    )
    with named_if_damaged(recorded):
        return check.verdicts() if trials else ()


def _losses(store: TraceStore, study: StudyRecord, strategy: Strategy) -> list[tuple[float, ...]]:
    """Return the losses under ``strategy`` in the longest quality trial of each seed.

    Those of a script that does not report a loss in every step are left out: the guard predicts
    windows of steps.
    """
    found: dict[object, tuple[float, ...]] = {}
    for trial in store.trials(study.study_id):
        if trial.kind == "quality" and trial.result is not None:
            seed, losses = trial.info["seed"], losses_of(trial.result)
            if not in_every_step(trial.result):
                continue
            if _same(study, trial.strategy, strategy) and len(losses) > len(found.get(seed, ())):
                found[seed] = losses
    return list(found.values())


def _same(study: StudyRecord, one: Strategy, other: Strategy) -> bool:
    """Return whether strategies have the same lossy part; false if one is outside of the space."""
    assert study.space is not None, "a study with quality trials has a space"
    try:
        return study.space.lossy_part(one) == study.space.lossy_part(other)
    except SpaceError:
        return False
