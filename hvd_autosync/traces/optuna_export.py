"""Export of a study to Optuna, for its dashboard."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from hvd_autosync.errors import ConfigurationError, StoreError
from hvd_autosync.search_space import CategoricalKnob, IntegerKnob, Knob, Value
from hvd_autosync.traces.location import resolve_location
from hvd_autosync.traces.records import StudyRecord, TrialRecord


def export_to_optuna(study: StudyRecord, trials: Sequence[TrialRecord], url: str) -> str:
    """Write a study to an Optuna storage, with the step time in milliseconds as the objective.

    If it cannot be written whole, nothing of it stays in the storage.

    Args:
        study: The study, with its space.
        trials: Its trials; those without a result are left out.
        url: URL of the Optuna storage, such as ``sqlite:///optuna.db``.

    Returns:
        The name of the Optuna study.

    Raises:
        ConfigurationError: Optuna is not installed, or the study has no space.
        StoreError: The storage cannot be written, or has the study already.
    """
    try:
        import optuna
    except ImportError:
        raise ConfigurationError(
            "this needs Optuna, which is not installed", hint="Install it: pip install optuna"
        ) from None
    if study.space is None:
        raise ConfigurationError(
            f"study {study.study_id} has no search space",
            hint="Choose a study that --autosync has recorded.",
        )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    name = f"hvd-autosync-{study.study_id}"
    location = resolve_location(url)
    shown = location.address if location.secrets or location.url.query else url
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            there = optuna.create_study(storage=url, study_name=name, direction="minimize")
            try:
                there.set_metric_names(["step time, ms"])
                there.set_user_attr("command", list(study.command))
                for trial in trials:
                    if trial.result is not None:
                        there.add_trial(_trial(optuna, study, trial))
            except BaseException:  # also Ctrl-C
                with contextlib.suppress(Exception):
                    optuna.delete_study(storage=url, study_name=name)
                raise
    except optuna.exceptions.DuplicatedStudyError:
        raise StoreError(
            f"{shown} has a study {name} already",
            hint=f"Delete it: optuna delete-study --storage {shown} --study-name {name}",
        ) from None
    except Exception as error:  # of any database driver
        reason = location.without_secrets(str(error).replace(url, shown))
        raise StoreError(
            f"Optuna cannot write to {shown}: {reason}",
            hint="Write for example sqlite:///optuna.db.",
        ) from error
    return name


def _trial(optuna: Any, study: StudyRecord, trial: TrialRecord) -> Any:
    assert study.space is not None and trial.result is not None, "the caller has checked"
    strategy = study.space.complete(trial.strategy)
    knobs = [knob for knob in study.space.knobs if knob.name in strategy]
    time_s = trial.result.step_time
    states = optuna.trial.TrialState
    found = optuna.trial.create_trial(
        params={knob.name: strategy[knob.name] for knob in knobs},
        distributions={knob.name: _distribution(optuna, knob) for knob in knobs},
        value=None if time_s is None else 1e3 * time_s.mean_s,
        state=states.FAIL if time_s is None else states.COMPLETE,
        user_attrs=_attributes(trial),
    )
    found.datetime_start = _local(trial.asked_at)
    if trial.told_at is not None:
        found.datetime_complete = _local(trial.told_at)
    return found


def _local(moment: str) -> datetime:
    """Return a moment as Optuna stores it: local time without a zone."""
    return datetime.fromisoformat(moment).astimezone().replace(tzinfo=None)


def _attributes(trial: TrialRecord) -> dict[str, Value]:
    assert trial.result is not None
    attributes: dict[str, Value] = {"kind": trial.kind, "status": trial.result.status.value}
    if trial.result.reason:
        attributes["reason"] = trial.result.reason
    return attributes


def _distribution(optuna: Any, knob: Knob) -> Any:
    kinds = optuna.distributions
    if isinstance(knob, CategoricalKnob):
        return kinds.CategoricalDistribution(knob.choices)
    log = knob.scale == "log" and knob.low > 0
    kind = kinds.IntDistribution if isinstance(knob, IntegerKnob) else kinds.FloatDistribution
    return kind(knob.low, knob.high, log=log)
