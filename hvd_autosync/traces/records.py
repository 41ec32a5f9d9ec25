"""What a trace is made of: one record per study, one per trial, as plain values.

The life of a study::

    create_study -> RUNNING -> FINISHED    it ended as planned, with or without a gain
                            -> FAILED      it could not end as planned
    a RUNNING study whose driver is dead can be claimed and goes on where it stopped
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space import SearchSpace, Strategy, Task, TrialResult

#: Entry of a finished study's outcome: what ranks said of steps that became slower for good.
DRIFT = "drift"
#: Another: the strategies that the loss guard has ended in trainings.
FALLBACKS = "fallbacks"
#: Both are added after the study has ended.
LATER = (DRIFT, FALLBACKS)
#: What making a value of JSON raises that others have written.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, SpaceError)


class StudyStatus(str, enum.Enum):
    """Where a study stands; see the module's drawing."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class Fallback:
    """A training that its loss guard has brought back to steps without loss.

    Attributes:
        strategy: What it ran under before.
        step: At which of its steps.
        reason: Why, for people.
        at: When it was written down, as :func:`timestamp` writes it.
    """

    strategy: Strategy
    step: int
    reason: str
    at: str = ""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return {**vars(self), "strategy": dict(self.strategy)}


@dataclass(frozen=True)
class StudyRecord:
    """One study.

    Attributes:
        study_id: Twelve hexadecimal digits.
        created_at: ISO 8601 with microseconds, UTC.
        job_key: Identifies the job and what may be tuned in it, whatever its settings.
        command: The ``horovodrun`` line, without secrets.
        settings: How the study was set up (seed, trials, steps ...), plain JSON.
        versions: Package -> version.
        status: Where it stands.
        task: What is tuned; known after the first trial.
        space: The space that is searched; known after the first trial.
        outcome: How it ended, plain JSON; ``None`` while running.
        winner: The strategy to train with; ``None`` while running or when there is none.
    """

    study_id: str
    created_at: str
    job_key: str
    command: tuple[str, ...]
    settings: dict[str, Any]
    versions: dict[str, str]
    status: StudyStatus
    task: Task | None
    space: SearchSpace | None
    outcome: dict[str, Any] | None
    winner: Strategy | None

    @property
    def drift(self) -> tuple[str, ...]:
        """What ranks of a training under the winner said of steps that became slower for good."""
        said = (self.outcome or {}).get(DRIFT)
        return tuple(map(str, said)) if isinstance(said, list) else ()

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The trainings under it that the loss guard has ended its strategy in, oldest first."""
        said = (self.outcome or {}).get(FALLBACKS)
        found = []
        for each in said if isinstance(said, list) else ():
            with contextlib.suppress(*_MALFORMED):
                found.append(
                    Fallback(
                        Strategy(each["strategy"]),
                        int(each["step"]),
                        str(each["reason"]),
                        str(each["at"]),
                    )
                )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, one entry per attribute."""
        return {
            **vars(self),
            "command": list(self.command),
            "status": self.status.value,
            "task": None if self.task is None else self.task.to_json(),
            "space": None if self.space is None else self.space.to_json(),
            "winner": None if self.winner is None else dict(self.winner),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> StudyRecord:
        """The study that :meth:`to_json` wrote."""
        task, space, winner = fields["task"], fields["space"], fields["winner"]
        converted = {
            "command": tuple(fields["command"]),
            "status": StudyStatus(fields["status"]),
            "task": None if task is None else Task.from_json(task),
            "space": None if space is None else SearchSpace.from_json(space),
            "winner": None if winner is None else Strategy(winner),
        }
        return cls(**{**fields, **converted})


@dataclass(frozen=True)
class TrialRecord:
    """One trial: what was asked and, once it has ended, what was told.

    Attributes:
        study_id: The study that it belongs to.
        number: Counts the trials of a study from 0.
        kind: Why it was asked: ``"default"``, ``"sobol"``, ``"model"``, ``"quality"`` or
            ``"confirm"``, or what another learner calls its own; rows of Horovod's own tuner are
            ``"horovod-autotune"``.
        strategy: The strategy to run under.
        asked_at: ISO 8601 with microseconds, UTC.
        told_at: The same; ``None`` exactly when ``result`` is.
        info: What the learner said when it was asked, plain JSON.
        result: How it ended; ``None`` when never told (in flight, or lost with its driver).
    """

    study_id: str
    number: int
    kind: str
    strategy: Strategy
    asked_at: str
    told_at: str | None
    info: dict[str, Any]
    result: TrialResult | None

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, one entry per attribute."""
        return {
            **vars(self),
            "strategy": dict(self.strategy),
            "result": None if self.result is None else self.result.to_json(),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TrialRecord:
        """The trial that :meth:`to_json` wrote."""
        result = fields["result"]
        converted = {
            "strategy": Strategy(fields["strategy"]),
            "result": None if result is None else TrialResult.from_json(result),
        }
        return cls(**{**fields, **converted})

    def info_number(self, name: str) -> float:
        """A number of :attr:`info`; NaN where there is none of that name."""
        value = self.info.get(name)
        return float(value) if isinstance(value, (int, float)) else math.nan


def default_result(trials: Sequence[TrialRecord]) -> TrialResult | None:
    """What the default gave: the last trial of that kind that was told, else the first trial.

    A first trial that was lost with its driver is repeated; restrictions that exclude the job as
    it is make the default another strategy; an imported log has no trial of that kind.
    """
    told = [t.result for t in trials if t.kind == "default" and t.result is not None]
    return told[-1] if told else trials[0].result if trials else None


def timestamp(moment: datetime | None = None) -> str:
    """``moment`` (default: now) as records write it: texts in this form sort by time."""
    moment = datetime.now(timezone.utc) if moment is None else moment.astimezone(timezone.utc)
    return moment.isoformat(timespec="microseconds")
