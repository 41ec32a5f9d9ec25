"""What goes into a study and what comes out of it, as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

from hvd_autosync.errors import AutosyncError, SpaceError, TraceFormatError
from hvd_autosync.search_space import Strategy, TrialResult
from hvd_autosync.search_space.trial import enough_steps
from hvd_autosync.study.confirm import Comparison
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.quality import Verdict
from hvd_autosync.traces import StudyRecord
from hvd_autosync.traces.checking import check_strategy, type_problem

#: Steps before the measured ones, where these are fewer.
_FEWEST_WARMUP = 3


@dataclass(frozen=True)
class StudySettings:
    """What a study was asked to do.

    Attributes:
        trials: Most trials before confirmation, the default's included.
        minutes: Most minutes in all; ``None``: no limit.
        steps: Steps measured in each trial.
        warmup: Steps before those.
        quality_steps: Steps of a trial that judges a lossy strategy by its losses.
        quality_minutes: Most minutes of all such trials.
        loss_tolerance: How much its loss may be above the default's, as a share of what the
            default's has fallen.
        goal: Whether it is judged after as many steps or after as much time (``options.GOALS``).
        allow: Lossy groups allowed.
        seed: Of every random choice.
        transfer: Whether finished studies of related tasks are learned from.
        expected_hours: How long the training will run: tuning must pay within that.
        fewer: Whether trials make fewer steps where these are long.
        anew: Whether the winner of a former study of the job was found slower in a training, or
            the loss guard has ended it there.
        left: The strategies that it has ended in trainings of the job; none of them can win.
    """

    trials: int = 20
    minutes: float | None = None
    steps: int = 40
    warmup: int = 10
    quality_steps: int = 200
    quality_minutes: float = 30.0
    loss_tolerance: float = 0.01
    goal: str = "steps"
    allow: tuple[str, ...] = ()
    seed: int = 0
    transfer: bool = True
    expected_hours: float = 10.0
    anew: bool = False
    fewer: bool = False
    left: tuple[Strategy, ...] = ()

    def steps_after(self, default: TrialResult | None) -> tuple[int, int]:
        """Steps of warm-up and measured ones of a trial after the default's.

        Args:
            default: What the default trial gave, if it has ended.
        """
        time_s = None if default is None else default.step_time
        if not self.fewer or time_s is None:
            return self.warmup, self.steps
        measured = enough_steps(time_s.mean_s, self.steps)
        return min(
            max(round(measured * self.warmup / self.steps), _FEWEST_WARMUP), self.warmup
        ), measured

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        fields = {**vars(self), "allow": list(self.allow)}
        del fields["left"]
        if self.left:  # nor do studies of earlier versions have it
            fields["left"] = [dict(strategy) for strategy in self.left]
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> StudySettings:
        """The settings that :meth:`to_json` wrote, here or in another version.

        Raises:
            TraceFormatError: A setting is of another type.
        """
        names = {each.name for each in dataclass_fields(cls)}
        known = {name: value for name, value in fields.items() if name in names}
        problem: str | None
        try:
            known["left"] = tuple(Strategy(each) for each in known.get("left", ()))
            settings = cls(**{**known, "allow": tuple(known.get("allow", ()))})
            problem = type_problem(settings)
        except (TypeError, ValueError, AttributeError, SpaceError) as error:
            problem = str(error)
        if problem is not None:
            raise TraceFormatError(
                f"the settings of a study are damaged: {problem:.200}",
                hint="Forget the study: hvd-autosync traces delete STUDY.",
            )
        return settings


@dataclass(frozen=True)
class Trial:
    """What to run next.

    Attributes:
        number: Its number in the study, from 0.
        kind: ``"default"``, ``"sobol"``, ``"model"``, ``"quality"`` or ``"confirm"``.
        strategy: The strategy to run under.
        steps: Steps to measure, where they are others than those of the settings.
        seed: Of all its random numbers; 0: the script's own.
    """

    number: int
    kind: str
    strategy: Strategy
    steps: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Conclusion:
    """How a study ended.

    Attributes:
        winner: The strategy to use: the best proven one, or the default.
        reason: One sentence for people.
        stopped: Why exploration ended.
        default_s: Step time of the default, seconds.
        comparisons: Confirmed candidates against the default, best first.
        verdicts: Of the lossy candidates, whether they were confirmed or not.
        source: Id of the study that found the winner, where another did.
    """

    winner: Strategy
    reason: str
    stopped: str
    default_s: float
    comparisons: tuple[Comparison, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    source: str = ""

    @property
    def best(self) -> Comparison | None:
        """The comparison that decided for a strategy other than the default, if any."""
        return next((c for c in self.comparisons if c.strategy == self.winner), None)

    @property
    def winner_s(self) -> float:
        """Step time of the winner, seconds, as the default's and the speed-up tell it."""
        return self.default_s / self.best.speedup if self.best is not None else self.default_s

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary; numbers that are not finite become ``None``."""
        comparisons = [
            {**vars(c), "strategy": dict(c.strategy), "high": _finite(c.high)}
            for c in self.comparisons
        ]
        return {
            **vars(self),
            "winner": dict(self.winner),
            "default_s": _finite(self.default_s),
            "comparisons": comparisons,
            "verdicts": [
                {name: _plain(value) for name, value in vars(verdict).items()}
                for verdict in self.verdicts
            ],
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Conclusion:
        """The conclusion that :meth:`to_json` wrote."""
        comparisons = tuple(
            Comparison(
                **{
                    **c,
                    "strategy": Strategy(c["strategy"]),
                    "high": math.inf if c["high"] is None else c["high"],
                }
            )
            for c in fields["comparisons"]
        )
        default_s = math.nan if fields["default_s"] is None else fields["default_s"]
        # Studies of earlier versions have neither verdicts nor a source.
        verdicts = tuple(_verdict(verdict) for verdict in fields.get("verdicts", ()))
        return cls(
            Strategy(fields["winner"]),
            fields["reason"],
            fields["stopped"],
            default_s,
            comparisons,
            verdicts,
            fields.get("source", ""),
        )

    @classmethod
    def of(cls, study: StudyRecord) -> Conclusion | None:
        """How ``study`` ended; ``None`` where it has not, or was not one of ours.

        Raises:
            TraceFormatError: What stands there is no conclusion, as in a stranger's trace.
        """
        if not study.outcome or "winner" not in study.outcome:
            return None
        try:
            conclusion = cls.from_json(study.outcome)
            problem = type_problem(conclusion)
            strategies = [each.strategy for each in conclusion.comparisons]
            for strategy in (*strategies, *(each.strategy for each in conclusion.verdicts)):
                check_strategy("comparisons and verdicts", strategy, study.space)
            if problem is None and conclusion.winner != study.winner:
                problem = "its winner is not the study's"
        except (LookupError, TypeError, ValueError, AttributeError, AutosyncError) as error:
            problem = str(error)
        if problem is not None:
            raise TraceFormatError(
                f"the conclusion of study {study.study_id} is damaged: {problem:.200}",
                hint=f"Forget the study: hvd-autosync traces delete {study.study_id}",
            )
        return conclusion


def _verdict(fields: dict[str, Any]) -> Verdict:
    """A verdict; those of earlier versions know only whether a strategy may be used."""
    fields = dict(fields)
    if "outcome" not in fields:
        fields["outcome"] = "admitted" if fields.pop("admissible") else "worse"
    numbers: dict[str, Any] = {
        name: math.nan if fields[name] is None else fields[name]
        for name in ("loss", "default_loss", "allowed", "bound")
        if name in fields
    }
    fields["strategy"] = Strategy(fields["strategy"])
    fields["outcome"] = Outcome(fields["outcome"])
    return Verdict(**{**fields, **numbers})


def _plain(value: Any) -> Any:
    if isinstance(value, Strategy):
        return dict(value)
    if isinstance(value, Outcome):
        return value.value
    return _finite(value) if isinstance(value, float) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
