"""Plain values of a study: its settings, trials and conclusion."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvd_autosync.errors import AutosyncError, ConfigurationError, TraceFormatError
from hvd_autosync.search_space import Strategy, TrialResult
from hvd_autosync.search_space.knobs import LOSSY_GROUPS
from hvd_autosync.search_space.records import LEFT_OUT, OrNan, Real, Record, read
from hvd_autosync.search_space.trial import enough_steps
from hvd_autosync.study import defaults
from hvd_autosync.study.confirm import Comparison
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import StudyRecord
from hvd_autosync.traces.validity import UnknownValueError, check_strategy

#: Fewest warm-up steps of a shortened trial.
_FEWEST_WARMUP = 3


@dataclass(frozen=True)
class StudySettings(Record):
    """The settings of a study.

    Attributes:
        trials: Largest number of trials before the confirmation, the default's included.
        minutes: Largest number of minutes in all; ``None``: no limit.
        steps: Measured steps of each trial.
        warmup: Warm-up steps before the measured ones.
        quality_steps: Steps of a quality trial, which judges a lossy strategy by its losses.
        quality_minutes: Largest number of minutes of all quality trials.
        loss_tolerance: Allowed loss of a lossy strategy above the default's, as a share of the
            decrease of the default's loss.
        goal: Whether losses are compared after equal steps or equal time (``"steps"`` or
            ``"time-to-loss"``).
        allow: Allowed groups of lossy knobs.
        seed: Seed of all random choices.
        transfer: Whether finished studies of related tasks are used.
        expected_hours: Expected hours of the training; tuning must pay within them.
        retune: Whether the job is tuned again, because the step time of an earlier study's winner
            has drifted in a training, or the loss guard abandoned it there.
        adaptive_steps: Whether trials have fewer steps if steps are long.
        excluded: The strategies that the loss guard ended in trainings of the job; none can win.
        mode: Where trials run: ``"launched"`` or ``"live"``, in the steps of the training.
        judged_by: Id of the study of launched trials under whose winner the training began, which
            is the default of this one; empty: it began as the job says.

    Raises:
        ConfigurationError: The loss tolerance is not above 0.
    """

    trials: int = defaults.TRIALS
    minutes: Real | None = None
    steps: int = defaults.STEPS
    warmup: int = defaults.WARMUP
    quality_steps: int = defaults.QUALITY_STEPS
    quality_minutes: Real = defaults.QUALITY_MINUTES
    loss_tolerance: Real = defaults.LOSS_TOLERANCE
    goal: str = defaults.GOAL
    allow: tuple[str, ...] = ()
    seed: int = defaults.SEED
    transfer: bool = True
    expected_hours: Real = defaults.EXPECTED_HOURS
    retune: bool = False
    adaptive_steps: bool = False
    excluded: tuple[Strategy, ...] = field(default=(), metadata=LEFT_OUT)
    mode: str = field(default="launched", metadata=LEFT_OUT)
    judged_by: str = field(default="", metadata=LEFT_OUT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.loss_tolerance > 0:
            raise ConfigurationError(
                f"loss_tolerance is {self.loss_tolerance}",
                hint="Choose a share above 0, or allow no lossy knobs.",
            )

    def check(self) -> None:
        """Check all settings, as a study begins; those of a stored study may be of older rules.

        Raises:
            ConfigurationError: A setting has a wrong type or value; the message names both.
        """
        try:
            read(StudySettings, json.loads(json.dumps(self.to_json())))
        except (ValueError, TypeError) as error:
            raise ConfigurationError(
                f"invalid settings of a study: {error}",
                hint="Give each setting the type that StudySettings documents.",
            ) from None
        for name, least in defaults.LEAST.items():
            self._require(name, getattr(self, name) >= least, f"{least} or more")
        self._require("seed", 0 <= self.seed < defaults.SEEDS, f"0 to {defaults.SEEDS - 1}")
        for name in ("minutes", "quality_minutes", "loss_tolerance", "expected_hours"):
            number = getattr(self, name)
            fits = number is None or 0 < number < math.inf
            self._require(name, fits, "a finite number above 0")
        for name, words in (("goal", defaults.GOALS), ("mode", defaults.MODES)):
            self._require(name, getattr(self, name) in words, " or ".join(map(repr, words)))
        known = set(self.allow) <= set(LOSSY_GROUPS)
        self._require("allow", known, f"groups of {', '.join(map(repr, LOSSY_GROUPS))}")

    def _require(self, name: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise ConfigurationError(
                f"invalid value {getattr(self, name)!r:.60} for {name} of StudySettings",
                hint=f"Give {wanted}.",
            )

    def steps_after(self, default: TrialResult | None) -> tuple[int, int]:
        """Return the numbers of warm-up and measured steps of a trial after the default's.

        Args:
            default: Result of the default trial, if it has ended.
        """
        time_s = None if default is None else default.step_time
        if not self.adaptive_steps or time_s is None:
            return self.warmup, self.steps
        measured = enough_steps(time_s.mean_s, self.steps)
        return min(
            max(round(measured * self.warmup / self.steps), _FEWEST_WARMUP), self.warmup
        ), measured

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StudySettings:
        """Return the settings that :meth:`to_json` of this or another version wrote.

        Raises:
            TraceFormatError: A setting has a wrong type or value.
        """
        try:
            return super().from_json(cls.known(values))
        except (ValueError, ConfigurationError) as error:
            raise TraceFormatError(
                f"the settings of a study are damaged: {error!s:.200}",
                hint="Forget the study: hvd-autosync traces delete STUDY.",
            ) from None


@dataclass(frozen=True)
class Trial:
    """The next trial to run.

    Attributes:
        number: Its number in the study, from 0.
        kind: ``"default"``, ``"sobol"``, ``"model"``, ``"quality"`` or ``"confirm"``.
        strategy: The strategy of the trial.
        steps: Steps to measure; ``None``: those of the settings.
        seed: Seed of all its random numbers; 0: the script's own.
    """

    number: int
    kind: str
    strategy: Strategy
    steps: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Conclusion(Record):
    """The conclusion of a study.

    Attributes:
        winner: The strategy to use: the best proven one, or the default.
        reason: One sentence for people.
        stopped: Why exploring ended.
        default_s: Step time of the default, seconds: the geometric mean over the rounds of the best
            comparison, or without one that of its first trial.
        comparisons: Comparisons of the confirmed candidates with the default, best first.
        verdicts: Verdicts on the lossy candidates, confirmed or not.
        source: Id of the study that found the winner, if it was another one.
    """

    winner: Strategy
    reason: str
    stopped: str
    default_s: OrNan
    comparisons: tuple[Comparison, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    source: str = ""

    @property
    def best(self) -> Comparison | None:
        """The comparison of the winner with the default, if the winner is another strategy."""
        return next((c for c in self.comparisons if c.strategy == self.winner), None)

    @property
    def winner_s(self) -> float:
        """Step time of the winner, seconds: that of the default over the speedup.

        It is the geometric mean over the winner's rounds, unless another study found it.
        """
        return self.default_s / self.best.speedup if self.best is not None else self.default_s

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Conclusion:
        """Return the conclusion that :meth:`to_json` of this or an earlier version wrote.

        Raises:
            ValueError: ``values`` is no conclusion.
            SpaceError: A strategy in it cannot be.
        """
        known = cls.known(values)
        if isinstance(known.get("verdicts"), list):
            known["verdicts"] = [_with_outcome(each) for each in known["verdicts"]]
        return super().from_json(known)

    @classmethod
    def of(cls, study: StudyRecord) -> Conclusion | None:
        """Return the conclusion of ``study``; ``None`` if it has none, or no winner.

        Raises:
            TraceFormatError: The stored conclusion is damaged, as in an imported trace.
        """
        if not study.outcome or "winner" not in study.outcome:
            return None
        try:
            conclusion = cls.from_json(study.outcome)
            strategies = [each.strategy for each in conclusion.comparisons]
            for strategy in (*strategies, *(each.strategy for each in conclusion.verdicts)):
                # Knobs of the study's own space may be wider than the catalogue's.
                if study.space is None or not study.space.holds(strategy):
                    check_strategy("comparisons and verdicts", strategy, study.space)
            if conclusion.winner != study.winner:
                raise ValueError("its winner is not the study's")
        except (ValueError, AutosyncError) as error:
            hint = f"Forget the study: hvd-autosync traces delete {study.study_id}"
            if isinstance(error, UnknownValueError):
                hint = f"{error.hint} Otherwise: {hint}"
            raise TraceFormatError(
                f"the conclusion of study {study.study_id} is damaged: {error!s:.200}", hint=hint
            ) from None
        return conclusion


def _with_outcome(verdict: object) -> object:
    """Entries of a verdict; earlier versions stored only whether a strategy may be used."""
    if not isinstance(verdict, dict) or "outcome" in verdict or "admissible" not in verdict:
        return verdict
    others = {name: value for name, value in verdict.items() if name != "admissible"}
    outcome = Outcome.ADMITTED if verdict["admissible"] else Outcome.WORSE
    return {**others, "outcome": outcome.value}
