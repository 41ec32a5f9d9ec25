"""How soon is a slow rank noticed, and how often one that is not? Simulated noise, no cluster.

Windows of 8 steps; of each rank the median of its steps' compute times. The noise of a step is
log-normal, with stalls of one rank or of all, and a level that all ranks drift along. Beside our
detector stands the rule of Sync-Switch (throughput below the mean minus one standard deviation for
as many windows in a row).

    python benchmarks/straggler_alarms.py
    python benchmarks/straggler_alarms.py --ranks 2 8 --steps 1000000 --output alarms.csv
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from hvd_autosync.runtime.stragglers.detector import Detector

WINDOW = 8
#: Windows before a rank becomes slow, and most windows that are waited for the alarm.
BEFORE, PATIENCE = 32, 200


class PaperRule:
    """Throughput below mean - 1 standard deviation for ``windows`` in a row."""

    def __init__(self, ranks: int, windows: int = 4) -> None:
        self._windows, self._in_a_row = windows, [0] * ranks

    def window(self, seconds: Sequence[float]) -> frozenset[int]:
        speeds = [1 / each for each in seconds]
        bound = statistics.fmean(speeds) - statistics.pstdev(speeds)
        self._in_a_row = [
            n + 1 if v < bound else 0 for n, v in zip(self._in_a_row, speeds, strict=True)
        ]
        return frozenset(r for r, n in enumerate(self._in_a_row) if n >= self._windows)


RULES = {"ours": Detector, "paper": PaperRule}


def windows(
    ranks: int,
    noise: float,
    count: int,
    seed: int,
    slow: Sequence[int] = (),
    factor: float = 1.0,
    begins: int = 0,
    mean: bool = False,
) -> Iterator[list[float]]:
    """Seconds per step of each rank, window by window; ``slow`` ones from window ``begins`` on."""
    random = np.random.default_rng(seed)
    for number in range(count):
        steps: npt.NDArray[np.float64] = np.exp(random.normal(0, noise, (ranks, WINDOW)))
        # Heavy tails: one step in 200 of a rank stalls, one in 300 of all.
        steps += (random.random(steps.shape) < 1 / 200) * random.pareto(1.5, steps.shape)
        steps += (random.random(WINDOW) < 1 / 300) * random.pareto(1.5, WINDOW)
        steps *= 1 + 0.3 * np.sin(number / 100)
        if number >= begins:
            steps[list(slow)] *= factor
        chosen = steps.mean(axis=1) if mean else np.median(steps, axis=1)
        yield [float(each) for each in chosen]


def false_alarms(rule: str, ranks: int, noise: float, steps: int, mean: bool) -> float:
    """Alarms per 10,000 steps without a straggler."""
    detector, before, alarms = RULES[rule](ranks), frozenset[int](), 0
    for each in windows(ranks, noise, steps // WINDOW, 0, mean=mean):
        now = detector.window(each)
        alarms += len(now - before)
        before = now
    return alarms / steps * 10_000


def delays(rule: str, ranks: int, noise: float, slow: int, factor: float, games: int) -> list[int]:
    """Windows from the first slow one until all slow ranks are flagged; ``PATIENCE``: never."""
    found = []
    for seed in range(games):
        detector, wanted = RULES[rule](ranks), frozenset(range(slow))
        flow = windows(ranks, noise, BEFORE + PATIENCE, seed, range(slow), factor, BEFORE)
        hits = (n for n, each in enumerate(flow) if detector.window(each) >= wanted and n >= BEFORE)
        found.append(next(hits, BEFORE + PATIENCE - 1) - BEFORE + 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="(default: 2 4 8)")
    parser.add_argument(
        "--noise",
        type=float,
        nargs="+",
        default=[0.1, 0.2, 0.3],
        help="deviation of the logarithm of a step (default: 0.1 0.2 0.3)",
    )
    parser.add_argument("--steps", type=int, default=200_000, help="without a straggler")
    parser.add_argument("--games", type=int, default=100, help="for each delay (default: 100)")
    parser.add_argument("--mean", action="store_true", help="means of windows in place of medians")
    parser.add_argument("--output", metavar="FILE", help="write the figures as CSV")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for rule in RULES:
        for ranks in options.ranks:
            for noise in options.noise:
                alarms = false_alarms(rule, ranks, noise, options.steps, options.mean)
                row: dict[str, object] = {
                    "rule": rule,
                    "ranks": ranks,
                    "noise": noise,
                    "alarms_per_10000": alarms,
                }
                for slow in (1, 2) if ranks >= 4 else (1,):
                    for factor in (1.5, 2.0, 4.0):
                        waited = delays(rule, ranks, noise, slow, factor, options.games)
                        row[f"{slow}_at_{factor:g}x"] = statistics.median(waited)
                        row[f"{slow}_at_{factor:g}x_worst"] = max(waited)
                rows.append(row)
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if options.output:
        names = list(dict.fromkeys(name for row in rows for name in row))
        with open(options.output, "w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
