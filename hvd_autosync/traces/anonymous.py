"""Anonymous studies, which can be shared.

Kept: the shapes and times of the model, the layout and links of the cluster, versions, strategies
and step times. Removed: the command, names of hosts and parameters, output of the job, losses,
times of day, and the ids of this and other studies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from hvd_autosync.search_space import Host, ModelProfile, Resources, Task, TrialResult
from hvd_autosync.traces.records import DRIFT, FALLBACKS, StudyRecord, TrialRecord, timestamp

_JOB_KEY, _COMMAND = "anonymous", ("horovodrun",)
#: Entries of a trial's ``info`` that are kept; they do not name other studies.
_KEPT_INFO = (
    "predicted_step_s",
    "predicted_low_s",
    "predicted_high_s",
    "acquisition",
    "expected_gain",
    "ask_s",
    "stopped",
    "candidates",
    "seed",
)
#: What to do with a strategy that needs classes of parameters, which an anonymous trace lacks.
NO_NAMES_HINT = (
    "Import the trace (hvd-autosync traces import) and tune the job: the first trials use its best "
    "strategies."
)
#: Entries of a verdict that are losses, or in their unit.
_LOSSES = ("loss", "default_loss", "allowed", "bound", "difference")


def anonymous_id(study_id: str) -> str:
    """Return the id under which a study is shared: always the same, without revealing its own."""
    return hashlib.sha256(study_id.encode()).hexdigest()[:12]


def is_anonymous(study: StudyRecord) -> bool:
    """Return whether a study was made anonymous, so that it has no names."""
    return study.job_key == _JOB_KEY


def anonymous(
    study: StudyRecord, trials: Sequence[TrialRecord]
) -> tuple[StudyRecord, list[TrialRecord]]:
    """Copies of the study and its trials without identifying data; see the module's docstring."""
    study_id = anonymous_id(study.study_id)
    begun = datetime.fromisoformat(study.created_at)
    earlier = begun - begun.replace(hour=0, minute=0, second=0, microsecond=0)
    hosts = {} if study.task is None else _aliases(study.task.resources)
    outcome = study.outcome and {**study.outcome, "reason": ""}
    if outcome:
        outcome.pop(DRIFT, None)  # names hosts
        if outcome.get("source"):
            outcome["source"] = anonymous_id(str(outcome["source"]))
        if isinstance(verdicts := outcome.get("verdicts"), list):
            outcome["verdicts"] = [_verdict(each) for each in verdicts if isinstance(each, dict)]
        if study.fallbacks:  # the strategies are kept, without times and losses
            outcome[FALLBACKS] = [
                replace(each, reason="", at="").to_json() for each in study.fallbacks
            ]
    settings = study.settings
    if judged_by := settings.get("judged_by"):
        settings = {**settings, "judged_by": anonymous_id(str(judged_by))}
    shared = replace(
        study,
        study_id=study_id,
        created_at=_moved(study.created_at, earlier),
        job_key=_JOB_KEY,
        command=_COMMAND,
        settings=settings,
        task=_task(study.task, hosts),
        outcome=outcome,
    )
    return shared, [_trial(trial, study_id, earlier, hosts) for trial in trials]


def _verdict(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a verdict without losses, and without its reason, which tells them."""
    removed = {name: None for name in _LOSSES if name in verdict}
    return {**verdict, **removed, "reason": ""}


def _aliases(resources: Resources) -> dict[str, str]:
    return {host.name: f"host{number}" for number, host in enumerate(resources.hosts)}


def _task(task: Task | None, hosts: dict[str, str]) -> Task | None:
    if task is None:
        return None
    named = tuple(Host(hosts[host.name], host.slots) for host in task.resources.hosts)
    return Task(_model(task.model), replace(task.resources, hosts=named))


def _model(model: ModelProfile) -> ModelProfile:
    parameters = tuple(
        replace(parameter, name=f"p{number}") for number, parameter in enumerate(model.parameters)
    )
    return replace(model, parameters=parameters)


def _trial(
    trial: TrialRecord, study_id: str, earlier: timedelta, hosts: dict[str, str]
) -> TrialRecord:
    told_at = None if trial.told_at is None else _moved(trial.told_at, earlier)
    info = {name: trial.info[name] for name in _KEPT_INFO if name in trial.info}
    result = None if trial.result is None else _result(trial.result, hosts)
    return replace(
        trial,
        study_id=study_id,
        asked_at=_moved(trial.asked_at, earlier),
        told_at=told_at,
        info=info,
        result=result,
    )


def _result(result: TrialResult, hosts: dict[str, str]) -> TrialResult:
    ranks = tuple(
        replace(rank, host=hosts.get(rank.host, "host"), losses=(), in_round=())
        for rank in result.ranks
    )
    profile = None if result.profile is None else _model(result.profile)
    return replace(result, reason="", stderr_tail="", ranks=ranks, profile=profile)


def _moved(moment: str, earlier: timedelta) -> str:
    return timestamp(datetime.fromisoformat(moment) - earlier)
