"""What one run of a recurring job came to, and what is decided from all of them so far."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hvd_autosync.errors import ConfigurationError

#: Without a tolerance: this share of the target, and so many deviations of the runs at f = 1.
_TOLERANCE, _DEVIATIONS = 0.01, 2.0


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        share: Share of its work that was under BSP, ``f``.
        metric: What it came to; larger is better. NaN where it failed or diverged.
        seconds: How long it took.
        status: ``completed``, ``diverged`` or ``failed``.
    """

    share: float
    metric: float
    seconds: float
    status: str = "completed"

    @property
    def finite(self) -> bool:
        """Whether it came to a metric."""
        return self.status == "completed" and math.isfinite(self.metric)


@dataclass(frozen=True)
class Decision:
    """What the next run does.

    Attributes:
        share: Share of its work under BSP.
        final: Whether this is the answer; otherwise a question.
        reason: One sentence for people.
    """

    share: float
    final: bool
    reason: str


@dataclass(frozen=True)
class Settings:
    """What is searched for.

    Attributes:
        target: Metric that is wanted; ``None``: what runs at f = 1 come to.
        tolerance: By how much a run may be below it; ``None``: 1 % of the target, and at least two
            standard deviations of the runs at f = 1, where there are several.
        repeats: Runs of each share that are asked for, f = 1 included (``R`` in the paper).
        settings: Most shares that are tried by the binary search (``M`` in the paper).
        runs: Most runs that the Bayesian search asks for.
        confidence: Probability that a share keeps the target, for it to be accepted by that.
        gain: It ends where no other share promises to save this share of a run's time.

    Raises:
        ConfigurationError: A number makes no sense.
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
    """Says what the next run of a recurring job does; a pure function of the runs so far."""

    def next_share(self, outcomes: Sequence[Outcome]) -> Decision:
        """The share to try, or the one that was found."""


@dataclass(frozen=True)
class Goal:
    """What a run has to come to.

    Attributes:
        target: The metric that is wanted.
        tolerance: By how much a run may be below it.
    """

    target: float
    tolerance: float

    @property
    def bound(self) -> float:
        """The least metric that is good enough."""
        return self.target - self.tolerance

    def kept_by(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether runs keep the target on average; one that failed does not."""
        if not all(each.finite for each in outcomes):
            return False
        return statistics.fmean(each.metric for each in outcomes) >= self.bound


def at_share(outcomes: Sequence[Outcome], share: float) -> list[Outcome]:
    """The runs with that share."""
    return [each for each in outcomes if each.share == share]


def goal_of(outcomes: Sequence[Outcome], settings: Settings) -> Goal | Decision:
    """What runs have to come to, or the run at f = 1 that it takes to know.

    Runs under BSP alone come first also where the target is given: they count the samples of a
    training, and say how long it takes.
    """
    baseline = at_share(outcomes, 1.0)
    metrics = [each.metric for each in baseline if each.finite]
    wanted = settings.repeats if settings.target is None else 1
    if len(metrics) < wanted:
        if len(baseline) >= wanted + settings.repeats:
            return Decision(1.0, True, "runs under BSP alone fail, so there is nothing to compare")
        reason = "BSP alone, to know what it comes to and how long it takes"
        return Decision(1.0, False, reason)
    target = statistics.fmean(metrics) if settings.target is None else settings.target
    if settings.tolerance is not None:
        return Goal(target, settings.tolerance)
    noise = statistics.stdev(metrics) if len(metrics) > 1 else 0.0
    return Goal(target, max(_TOLERANCE * abs(target), _DEVIATIONS * noise))
