"""Outcomes of the runs of a recurring job, and decisions of a search on them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hvd_autosync.errors import ConfigurationError

#: Default tolerance, and the most that noise can raise it to, as shares of the target.
_TOLERANCE, _MOST = 0.01, 0.02
#: It is at least so many standard errors of the difference of two means of runs at f = 1.
_ERRORS = 2.0


@dataclass(frozen=True)
class RecurringOutcome:
    """The outcome of one run.

    Attributes:
        share: Share of its work under BSP, ``f``.
        metric: Its metric; larger is better. NaN if it failed or diverged.
        seconds: Its duration.
        status: ``completed``, ``diverged`` or ``failed``.
        planned: The share that was planned, which is another one if the work has grown.
    """

    share: float
    metric: float
    seconds: float
    status: str = "completed"
    planned: float = math.nan

    @property
    def finite(self) -> bool:
        """Whether it completed with a finite metric."""
        return self.status == "completed" and math.isfinite(self.metric)


@dataclass(frozen=True)
class NextShare:
    """The decision of a search.

    Attributes:
        share: Share of the work under BSP for the next run.
        final: Whether the search has ended with this share; otherwise the next run tries it.
        reason: One sentence for people.
    """

    share: float
    final: bool
    reason: str


@dataclass(frozen=True)
class SearchSettings:
    """The settings of a search.

    Attributes:
        target: Target metric; ``None``: the mean metric of the runs at f = 1.
        tolerance: Allowed difference below the target; ``None``: 1 % of the target, up to 2 % if
            runs at f = 1 differ so much.
        repeats: Runs at f = 1 and, in the binary search, at each share (``R`` in the paper).
        settings: Number of shares that the binary search tries (``M`` in the paper).
        runs: Largest number of runs of the Bayesian search, of which those at f = 1 count as one.
        confidence: Least probability to keep the target with which the Bayesian search accepts a
            share.
        gain: The Bayesian search ends if no other share is expected to save this share of a run.

    Raises:
        ConfigurationError: A number is out of range.
    """

    target: float | None = None
    tolerance: float | None = None
    repeats: int = 1
    settings: int = 5
    runs: int = 10
    confidence: float = 0.8
    gain: float = 0.02

    def __post_init__(self) -> None:
        for name, wrong, wanted in (
            ("target", self.target is not None and not math.isfinite(self.target), "finite"),
            (
                "tolerance",
                self.tolerance is not None and not 0 <= self.tolerance < math.inf,
                "at least 0",
            ),
            ("repeats", self.repeats < 1, "at least 1"),
            ("settings", self.settings < 1, "at least 1"),
            ("runs", self.runs < 1, "at least 1"),
            ("confidence", not 0 < self.confidence < 1, "between 0 and 1"),
            ("gain", not 0 <= self.gain < 1, "from 0 to 1"),
        ):
            if wrong:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} of a search over recurring runs",
                    hint=f"It must be {wanted}.",
                )


class Search(Protocol):
    """Decides on the next run of a recurring job; a pure function of the runs so far."""

    def next_share(self, outcomes: Sequence[RecurringOutcome]) -> NextShare:
        """Return the share to try next, or the final one."""


@dataclass(frozen=True)
class Goal:
    """The goal of a search.

    Attributes:
        target: Target metric.
        tolerance: Allowed difference below the target.
    """

    target: float
    tolerance: float

    @property
    def bound(self) -> float:
        """The smallest metric that keeps the target."""
        return self.target - self.tolerance

    def kept_by(self, outcomes: Sequence[RecurringOutcome]) -> bool:
        """Return whether runs keep the target on average; they do not if one of them failed."""
        if not all(each.finite for each in outcomes):
            return False
        return statistics.fmean(each.metric for each in outcomes) >= self.bound


def at_share(outcomes: Sequence[RecurringOutcome], share: float) -> list[RecurringOutcome]:
    """Return the runs that had that share, or were planned with it."""
    return [each for each in outcomes if share in (each.share, each.planned)]


def goal_of(outcomes: Sequence[RecurringOutcome], settings: SearchSettings) -> Goal | NextShare:
    """Return the goal, or a decision for a run at f = 1 that is needed first.

    Baseline runs with BSP only come first even if the target is given: they count the samples of
    the training, measure its duration, and their spread can raise the tolerance.
    """
    baseline = at_share(outcomes, 1.0)
    metrics = [each.metric for each in baseline if each.finite]
    if len(metrics) < settings.repeats:
        if len(baseline) >= 2 * settings.repeats:
            return NextShare(
                1.0, True, "the baseline runs with BSP only failed: nothing to compare"
            )
        reason = "baseline run with BSP only, to measure its metric and its duration"
        return NextShare(1.0, False, reason)
    target = statistics.fmean(metrics) if settings.target is None else settings.target
    if settings.tolerance is not None:
        return Goal(target, settings.tolerance)
    return Goal(target, _default_tolerance(target, metrics))


def _default_tolerance(target: float, metrics: Sequence[float]) -> float:
    """Return the tolerance if none was given.

    Noise raises it, so that equal shares are not told apart by chance, but only so far: otherwise a
    share would be accepted for the noise of the runs, however much worse it is.

    Args:
        target: The target.
        metrics: Those of the runs at f = 1, at least one.
    """
    count = len(metrics)
    error = statistics.stdev(metrics) * math.sqrt(2 / count) if count > 1 else 0.0
    return min(max(_TOLERANCE * abs(target), _ERRORS * error), _MOST * abs(target))
