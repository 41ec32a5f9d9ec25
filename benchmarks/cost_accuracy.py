"""How well does the cost model rank the strategies of a task, before and after some trials?

For each measured table: the share of pairs of strategies that are ranked as they were measured
(AutoSync's ranking accuracy), and the root mean square of the error of the logarithm, by

    default only   the cost model, calibrated to the default's trial alone
    20 trials      calibrated to 20 random strategies, on all others; the median of 20 draws
    learner, 20    our learner's model with the cost model as its prior function, likewise
    linear, 20     AutoSync's 12-feature linear ranker, trained on the same 20 strategies
    linear, 40     trained on 40
    ceiling        what a perfect model could reach, by the noise of repeated measurements

    python benchmarks/cost_accuracy.py
    python benchmarks/cost_accuracy.py --speed     # 10,000 strategies of a model of 200 tensors
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from command_line import new_parser
from contest.autosync_ranker import LinearRanker
from contest.emulator import Emulator, concordance
from contest.hypothetical import HypotheticalTask
from rich.console import Console
from rich.table import Table

from hvd_autosync.cost import CostModel, calibrate
from hvd_autosync.cost.coefficients import UNCALIBRATED
from hvd_autosync.cost.columns import Columns
from hvd_autosync.learner import Observation, fit
from hvd_autosync.learner.points import FloatArray, encode_all, sobol_points
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import Strategy, Value

_TABLES = Path(__file__).resolve().parent / "traces"
#: Predicts the logarithms of others from some strategies and theirs.
Predict = Callable[[Sequence[Strategy], FloatArray, Sequence[Strategy]], FloatArray]


class Judge:
    """One table.

    Args:
        table: It.
        draws: How often trials are drawn.
    """

    def __init__(self, table: Emulator, draws: int) -> None:
        self._table, self._draws = table, draws
        self._cost = CostModel(table.task.model, table.task.resources)
        self._held = dict(table.space.fixed)
        self.strategies, self.log_step = table.measured()

    def cost(
        self, seen: Sequence[Strategy], log_step: FloatArray, others: Sequence[Strategy]
    ) -> FloatArray:
        """By the calibrated cost model."""
        found = calibrate(self._cost, self._with_held(seen), np.exp(log_step).tolist())
        predicted: FloatArray = np.log(
            self._cost.predict(self._with_held(others), found.coefficients)
        )
        return predicted

    def learner(
        self, seen: Sequence[Strategy], log_step: FloatArray, others: Sequence[Strategy]
    ) -> FloatArray:
        """By our learner's model."""
        observations = [
            Observation(s, float(np.exp(y))) for s, y in zip(seen, log_step, strict=True)
        ]
        return fit(Problem(self._table.space, self._table.task), observations).predict(others)[0]

    def linear(
        self, seen: Sequence[Strategy], log_step: FloatArray, others: Sequence[Strategy]
    ) -> FloatArray:
        """By AutoSync's ranker, which has no unit."""
        ranker = LinearRanker(self._table.task)
        ranker.fit(self._with_held(seen), log_step)
        return ranker.score(self._with_held(others))

    def held_out(self, predict: Predict, count: int) -> tuple[float, float]:
        """Median ranking accuracy and error on the strategies that were not seen."""
        right, errors = [], []
        for draw in range(self._draws):
            order = np.random.default_rng([count, draw]).permutation(len(self.strategies))
            own, rest = order[:count], order[count:]
            predicted = predict(
                [self.strategies[i] for i in own],
                self.log_step[own],
                [self.strategies[i] for i in rest],
            )
            right.append(concordance(predicted, self.log_step[rest]))
            errors.append(float(np.sqrt(np.mean((predicted - self.log_step[rest]) ** 2))))
        return statistics.median(right), statistics.median(errors)

    def ceiling(self) -> float:
        """Ranking accuracy of the truth against noisy measurements, from the interpolated truth."""
        rng = np.random.default_rng(0)
        truth = self._table.log_step(encode_all(self._table.space, self.strategies))
        noise = rng.normal(0, self._table.noise, (50, len(truth)))
        return statistics.median(concordance(truth, truth + each) for each in noise)

    def default_only(self) -> tuple[float, float]:
        """Ranking accuracy and error of the cost model that knows the default's trial alone."""
        default = self._table.space.default
        place = self.strategies.index(default)
        others = [s for s in self.strategies if s != default]
        rest = np.delete(self.log_step, place)
        predicted = self.cost([default], self.log_step[[place]], others)
        error = float(np.sqrt(np.mean((predicted - rest) ** 2)))
        return concordance(predicted, rest), error

    def _with_held(self, strategies: Sequence[Strategy]) -> list[dict[str, Value]]:
        return [{**self._held, **strategy} for strategy in strategies]


def accuracy(folder: Path, draws: int) -> None:
    """Print the table."""
    shown = Table(title="ranking accuracy (error of the logarithm)")
    for column in (
        "table",
        "strategies",
        "noise",
        "ceiling",
        "default only",
        "20 trials",
        "learner, 20",
        "linear, 20",
        "linear, 40",
    ):
        shown.add_column(column)
    columns: list[list[float]] = []
    for path in sorted(folder.glob("*.jsonl*")):
        table = Emulator(path)
        judge = Judge(table, draws)
        results = [
            judge.default_only(),
            judge.held_out(judge.cost, 20),
            judge.held_out(judge.learner, 20),
            judge.held_out(judge.linear, 20),
            judge.held_out(judge.linear, 40),
        ]
        columns.append([right for right, _ in results])
        cells = [
            f"{right:.3f}" + (f" ({error:.2f})" if index < 3 else "")
            for index, (right, error) in enumerate(results)
        ]
        shown.add_row(
            table.name,
            str(len(judge.strategies)),
            f"{table.noise:.3f}",
            f"{judge.ceiling():.3f}",
            *cells,
        )
    medians = [f"{statistics.median(each):.3f}" for each in zip(*columns, strict=True)]
    shown.add_row("median", "", "", "", *medians)
    Console(width=None if sys.stdout.isatty() else 150).print(shown)


def speed(strategies: int, tensors: int) -> None:
    """Print the time of a prediction of many strategies."""
    task = HypotheticalTask(tensors)
    points = sobol_points(task.space, strategies, 0)
    times = []
    for _ in range(7):
        began = time.perf_counter()
        task.cost.seconds(Columns.at(task.space, points), [UNCALIBRATED])
        times.append(time.perf_counter() - began)
    print(
        f"{strategies} strategies of {tensors} tensors: median {statistics.median(times):.2f} s "
        f"({min(times):.2f} to {max(times):.2f})"
    )


def main() -> None:
    """Prints the table, or the speed."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--tables", type=Path, default=_TABLES, metavar="FOLDER", help="(default: %(default)s)")
    add("--draws", type=int, default=20, help="of the trials (default: %(default)s)")
    add("--speed", action="store_true", help="time predictions instead")
    args = parser.parse_args()
    if args.speed:
        speed(10_000, 200)
    else:
        accuracy(args.tables, args.draws)


if __name__ == "__main__":
    main()
