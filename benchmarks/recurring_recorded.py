"""How many runs does each search of a recurring job need, and how good is the share that it finds?

Both searches are simulated on recorded runs of one job, at several shares of BSP and with several
seeds: ``hvd-autosync recurring JOB --export runs.csv`` writes those of the store. A simulated run
at any share interpolates the mean metric and time of the neighbouring shares linearly, and adds the
deviation of a random run at the nearest recorded share from the mean of that share.

    python benchmarks/recurring_recorded.py runs.csv --tolerance 0.01
    python benchmarks/recurring_recorded.py runs.csv --output games.csv
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from command_line import new_parser
from rich.console import Console
from rich.table import Table

from hvd_autosync.errors import AutosyncError, ConfigurationError
from hvd_autosync.recurring import SEARCHES
from hvd_autosync.recurring.outcomes import Goal, RecurringOutcome, Search, SearchSettings, goal_of

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

    def __init__(self, outcomes: Sequence[RecurringOutcome]) -> None:
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

    def run(self, share: float, random: np.random.Generator) -> RecurringOutcome:
        """Simulate a run at ``share``."""
        nearest = min(self._runs, key=lambda each: (abs(each - share), each))
        runs = self._runs[nearest]
        drawn = runs[int(random.integers(len(runs)))]
        if not drawn.finite:
            return RecurringOutcome(share, math.nan, drawn.seconds, drawn.status)
        return RecurringOutcome(
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


def _outcome(row: dict[str, str]) -> RecurringOutcome:
    share, metric, seconds = (float(row[name] or "nan") for name in _COLUMNS)
    if not 0 <= share <= 1:
        raise ValueError(f"share {share}")
    finite = math.isfinite(metric)
    if finite and not 0 < seconds < math.inf:
        raise ValueError(f"seconds {seconds}")
    return RecurringOutcome(share, metric, seconds, "completed" if finite else "diverged")


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

    outcomes: tuple[RecurringOutcome, ...]
    share: float
    runs: int
    excess: float
    violates: bool
    missed: int
    seconds: float


def play(table: Recorded, search: Search, settings: SearchSettings, seed: int = 0) -> Game:
    """Simulate ``search`` until it ends."""
    random = np.random.default_rng(seed)
    outcomes: list[RecurringOutcome] = []
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


def true_goal(
    table: Recorded, outcomes: Sequence[RecurringOutcome], settings: SearchSettings
) -> Goal:
    """Return the goal without the noise of runs: its target is the mean of the table."""
    found = goal_of(outcomes, settings)
    target = table.metric(1.0) if settings.target is None else settings.target
    tolerance = found.tolerance if isinstance(found, Goal) else settings.tolerance or 0.0
    return Goal(target, tolerance)


def table_of(games: dict[str, list[Game]]) -> Table:
    """One row per search."""
    table = Table(
        "search",
        "runs to the final f",
        "f",
        "slower than the best f",
        "misses the target",
        "runs below target",
        "time of the runs",
        caption="runs, f: median (range) over the simulations; slower: time of a run at the final "
        "f relative to the fastest f that meets the target, over simulations that meet it; misses: "
        "share of simulations whose final f misses the target; runs below target: mean number per "
        "simulation; time: relative to the same number of runs with BSP only",
        caption_justify="left",
    )
    for name, played in games.items():
        runs, shares = [each.runs for each in played], [each.share for each in played]
        kept = [each.excess for each in played if not each.violates]
        table.add_row(
            name,
            f"{statistics.median(runs):g} ({min(runs)} .. {max(runs)})",
            f"{statistics.median(shares):.4g} ({min(shares):.4g} .. {max(shares):.4g})",
            f"{statistics.fmean(kept):.1%}" if kept else "-",
            f"{statistics.fmean(each.violates for each in played):.0%}",
            f"{statistics.fmean(each.missed for each in played):.1f}",
            f"{statistics.fmean(each.seconds for each in played):.0%}",
        )
    return table


def main() -> None:
    """Run the benchmark."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add(
        "recorded",
        metavar="FILE.csv",
        help="one run per row, with the columns share (f, 0 to 1), metric (larger is better; "
        "empty: the run failed) and seconds",
    )
    add("--target", type=float, help="metric (default: that at f = 1)")
    add("--tolerance", type=float, help="largest accepted shortfall below the target")
    add("--repeats", type=int, default=1, help="runs of each f (default: %(default)s)")
    add("--games", type=int, default=50, help="simulations of each search (default: %(default)s)")
    add("--output", metavar="FILE", help="one row per simulation, as CSV")
    args = parser.parse_args()
    try:
        recorded = Recorded.read(args.recorded)
        settings = SearchSettings(args.target, args.tolerance, args.repeats)
    except AutosyncError as error:
        parser.error(str(error))
    games = {
        name: [play(recorded, search(settings), settings, seed) for seed in range(args.games)]
        for name, search in SEARCHES.items()
    }
    if args.output:
        with open(args.output, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            names = ("share", "runs", "excess", "violates", "missed", "seconds")
            writer.writerow(["search", "seed", *names])
            for name, played in games.items():
                for seed, game in enumerate(played):
                    writer.writerow([name, seed, *(getattr(game, each) for each in names)])
    Console(width=None if sys.stdout.isatty() else 160).print(table_of(games))


if __name__ == "__main__":
    main()
