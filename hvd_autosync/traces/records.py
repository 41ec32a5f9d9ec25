"""The records of a trace: one per study and one per trial, as plain values.

The life of a study::

    create_study -> RUNNING -> FINISHED    it ended as planned, with or without a gain
                            -> FAILED      it could not end as planned

If the driver of a RUNNING study is dead, another driver can claim and resume the study.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space import SearchSpace, StepTime, Strategy, Task, TrialResult
from hvd_autosync.search_space.records import Record, stored_as

if TYPE_CHECKING:
    _Space = SearchSpace
else:
    _Space = stored_as(SearchSpace, SearchSpace.from_json)

#: Entry of a study's outcome: reports of drift, a lasting change of step times of later trainings.
DRIFT = "drift"
#: Entry of a study's outcome: fallbacks of the loss guard in later trainings.
FALLBACKS = "fallbacks"
#: Entries that trainings add to the outcome.
LATER = (DRIFT, FALLBACKS)


class StudyStatus(str, enum.Enum):
    """The state of a study; see the module's docstring."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class Fallback(Record):
    """A fallback: the loss guard of a training has switched it to exact steps.

    Attributes:
        strategy: The strategy before.
        step: The step of the fallback.
        reason: The reason, for people.
        at: When it was recorded, as :func:`timestamp` writes it.
    """

    strategy: Strategy
    step: int
    reason: str
    at: str = ""


@dataclass(frozen=True)
class StudyRecord(Record):
    """One study.

    Attributes:
        study_id: Twelve hexadecimal digits.
        created_at: ISO 8601 with microseconds, UTC.
        job_key: Identifies the job and what may be tuned in it, independent of the settings.
        command: The ``horovodrun`` line, without secrets.
        settings: The settings of the study (seed, trials, steps ...), plain JSON.
        versions: Package -> version.
        status: Its state.
        task: The task; known after the first trial.
        space: The search space; known after the first trial.
        outcome: Its outcome, plain JSON; ``None`` while it runs.
        winner: The strategy to train with; ``None`` while it runs or if there is none.
    """

    study_id: str
    created_at: str
    job_key: str
    command: tuple[str, ...]
    settings: dict[str, Any]
    versions: dict[str, str]
    status: StudyStatus
    task: Task | None
    space: _Space | None
    outcome: dict[str, Any] | None
    winner: Strategy | None

    @property
    def failure(self) -> str:
        """The reason of a study that has failed."""
        return str((self.outcome or {}).get("reason", "unknown"))

    @property
    def drift(self) -> tuple[str, ...]:
        """Reports of drift in trainings under the winner."""
        entry = (self.outcome or {}).get(DRIFT)
        return tuple(map(str, entry)) if isinstance(entry, list) else ()

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Fallbacks of the loss guard in trainings under the study's strategies, oldest first."""
        entry = (self.outcome or {}).get(FALLBACKS)
        found = []
        for each in entry if isinstance(entry, list) else ():
            with contextlib.suppress(ValueError, SpaceError):
                found.append(Fallback.from_json(each))
        return tuple(found)


@dataclass(frozen=True)
class TrialRecord(Record):
    """One trial: the request and, after its end, the result.

    Attributes:
        study_id: The study that it belongs to.
        number: Its number in the study, from 0.
        kind: Its purpose: ``"default"``, ``"sobol"``, ``"model"``, ``"quality"`` or ``"confirm"``,
            or a kind of another learner; samples of Horovod's own tuner are
            ``"horovod-autotune"``.
        strategy: The strategy to run under.
        asked_at: When it was asked for; ISO 8601 with microseconds, UTC.
        told_at: When its result was recorded, in the same format; ``None`` exactly if ``result``
            is.
        info: The learner's information on its choice, plain JSON.
        result: Its result; ``None`` if there is none (running, or lost with its driver).
    """

    study_id: str
    number: int
    kind: str
    strategy: Strategy
    asked_at: str
    told_at: str | None
    info: dict[str, Any]
    result: TrialResult | None

    @property
    def step_time(self) -> StepTime | None:
        """Its step time; ``None`` if none was measured."""
        return None if self.result is None else self.result.step_time

    def info_number(self, name: str) -> float:
        """Return the number ``name`` in :attr:`info`; NaN if there is none."""
        value = self.info.get(name)
        return float(value) if isinstance(value, (int, float)) else math.nan


def default_result(trials: Sequence[TrialRecord]) -> TrialResult | None:
    """Return the result of the last default trial that was measured, else of the last that ended.

    There can be several default trials: one that was lost with its driver is repeated, so is that
    of a study that has rested, and if restrictions exclude the job's own strategy, the default is
    another one. An imported log has none: then it is the result of the first trial.
    """
    told = [t.result for t in trials if t.kind == "default" and t.result is not None]
    measured = [result for result in told if result.step_time is not None]
    return (measured or told)[-1] if told else trials[0].result if trials else None


def timestamp(moment: datetime | None = None) -> str:
    """``moment`` (default: now) as text, in a format that sorts by time."""
    moment = datetime.now(timezone.utc) if moment is None else moment.astimezone(timezone.utc)
    return moment.isoformat(timespec="microseconds")
