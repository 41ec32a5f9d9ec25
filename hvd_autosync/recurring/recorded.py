"""Simulation of a search on recorded outcomes: its number of runs, and the quality of its share.

A table has the runs of one job at several shares, with several seeds. A simulated run at any share
interpolates the mean metric and time of the neighbouring shares linearly, and adds the deviation of
a random run at the nearest recorded share from the mean of that share.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.recurring.outcomes import Goal, Outcome, Search, Settings, goal_of

_COLUMNS = ("share", "metric", "seconds")
#: Number of grid points among which the best share is searched.
_FINE = 401
#: A game ends after so many runs, even if the search has not ended.
_MOST_RUNS = 100


class Recorded:
    """The recorded runs of one job.

    Args:
        outcomes: The runs, including some at f = 1.

    Raises:
        ConfigurationError: There are no completed runs at f = 1, or at no other share.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._runs = {
            share: [each for each in outcomes if each.share == share]
            for share in sorted({each.share for each in outcomes})
        }
        self.shares = [s for s, runs in self._runs.items() if any(e.finite for e in runs)]
        if len(self.shares) < 2 or self.shares[-1] != 1:
            raise ConfigurationError(
                "recorded outcomes need finished runs at share 1 and at one more at least",
                hint="Record runs with BSP only (share 1) and at some other shares.",
            )
        finite = [[e for e in self._runs[s] if e.finite] for s in self.shares]
        self._metrics = [float(np.mean([each.metric for each in runs])) for runs in finite]
        self._seconds = [float(np.mean([each.seconds for each in runs])) for runs in finite]

    @classmethod
    def read(cls, path: str | Path) -> Recorded:
        """Read the runs from a CSV file with the columns share, metric and seconds.

        A run with an empty metric or ``nan`` counts as diverged.

        Raises:
            ConfigurationError: The file cannot be read, or has other content.
        """
        try:
            with open(path, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            outcomes = [_outcome(row) for row in rows]
        except (OSError, UnicodeDecodeError, csv.Error, KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"recorded outcomes {str(path)!r} cannot be read: {error!r}",
                hint=f"Write a CSV file with the columns {', '.join(_COLUMNS)}, one row per run.",
            ) from None
        return cls(outcomes)

    def metric(self, share: float) -> float:
        """Return the mean metric of runs at ``share``."""
        return float(np.interp(share, self.shares, self._metrics))

    def seconds(self, share: float) -> float:
        """Return the mean seconds of runs at ``share``."""
        return float(np.interp(share, self.shares, self._seconds))

    def run(self, share: float, random: np.random.Generator) -> Outcome:
        """Simulate a run at ``share``."""
        nearest = min(self._runs, key=lambda each: (abs(each - share), each))
        runs = self._runs[nearest]
        drawn = runs[int(random.integers(len(runs)))]
        if not drawn.finite:
            return Outcome(share, math.nan, drawn.seconds, drawn.status)
        return Outcome(
            share,
            self.metric(share) + drawn.metric - self.metric(nearest),
            max(self.seconds(share) + drawn.seconds - self.seconds(nearest), 1e-9),
        )

    def best(self, goal: Goal) -> float:
        """Return the fastest share whose mean keeps the target; 1 if there is none."""
        kept = [f for f in np.linspace(0, 1, _FINE) if self.keeps(float(f), goal)]
        return float(min(kept, key=self.seconds, default=1.0))

    def keeps(self, share: float, goal: Goal) -> bool:
        """Whether runs at ``share`` keep the target on average."""
        nearest = min(self._runs, key=lambda each: (abs(each - share), each))
        failed = [each for each in self._runs[nearest] if not each.finite]
        if 2 * len(failed) > len(self._runs[nearest]):
            return False
        return self.metric(share) >= goal.bound - 1e-12


def _outcome(row: dict[str, str]) -> Outcome:
    share, metric, seconds = (float(row[name] or "nan") for name in _COLUMNS)
    if not 0 <= share <= 1:
        raise ValueError(f"share {share}")
    finite = math.isfinite(metric)
    if finite and not 0 < seconds < math.inf:
        raise ValueError(f"seconds {seconds}")
    return Outcome(share, metric, seconds, "completed" if finite else "diverged")


@dataclass(frozen=True)
class Game:
    """The result of one simulated search.

    Attributes:
        outcomes: Its runs.
        share: The final share.
        runs: Number of runs.
        excess: Relative excess of a run's time at the final share over the fastest share that keeps
            the target; negative if it is faster and misses the target.
        violates: Whether runs at the final share miss the target on average.
        missed: Number of its runs that missed the target.
        seconds: Total time of its runs over that of as many runs with BSP only.
    """

    outcomes: tuple[Outcome, ...]
    share: float
    runs: int
    excess: float
    violates: bool
    missed: int
    seconds: float


def play(table: Recorded, search: Search, settings: Settings, seed: int = 0) -> Game:
    """Simulate ``search`` until it ends."""
    random = np.random.default_rng(seed)
    outcomes: list[Outcome] = []
    decision = search.next_share(outcomes)
    while not decision.final and len(outcomes) < _MOST_RUNS:
        outcomes.append(table.run(decision.share, random))
        decision = search.next_share(outcomes)
    goal = true_goal(table, outcomes, settings)
    best = table.seconds(table.best(goal))
    missed = sum(not each.finite or each.metric < goal.bound for each in outcomes)
    whole = sum(each.seconds for each in outcomes if math.isfinite(each.seconds))
    return Game(
        tuple(outcomes),
        decision.share,
        len(outcomes),
        table.seconds(decision.share) / best - 1,
        not table.keeps(decision.share, goal),
        missed,
        whole / (len(outcomes) * table.seconds(1.0)) if outcomes else math.nan,
    )


def true_goal(table: Recorded, outcomes: Sequence[Outcome], settings: Settings) -> Goal:
    """Return the goal without the noise of runs: its target is the mean of the table."""
    found = goal_of(outcomes, settings)
    target = table.metric(1.0) if settings.target is None else settings.target
    tolerance = found.tolerance if isinstance(found, Goal) else settings.tolerance or 0.0
    return Goal(target, tolerance)
