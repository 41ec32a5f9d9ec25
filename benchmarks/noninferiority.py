"""How often is a lossy strategy admitted that is worse, and one that is as good? Simulated losses.

Losses of a default that falls by 1, and of candidates that are above it by a planted multiple of
the tolerance (1 % of the fall). Steps share the noise of their batch; a candidate has noise of
its own, of steps and of whole trainings, of one kind:

- ``normal``: each training is off by a normal number, and each step;
- ``heavy``: trainings and steps by Student's t of 3 degrees;
- ``correlated``: steps follow each other, by 0.95 of the step before;
- ``epochs``: the noise of steps repeats itself every 40 steps;
- ``skewed``: each training is off by an exponential number: mostly a little better, now and then
  much worse; a quarter of the variance is that of steps, and normal;
- ``exponential``: as ``skewed``, without noise of steps;
- ``rare``: normal, but the planted difference is that of one training in ten, which is off by ten
  times of it.

``spread`` is the standard deviation of a pair's mean difference, in tolerances (for ``rare``, of
the other nine). ``fall_deviation`` is that of the default's fall over seeds, as a share of the
fall, beyond the noise of batches: the tolerance is a share of a fall that is estimated. A cell
judges single candidates; the rows named "study" judge six that are all worse by one tolerance,
beside the same default, until one is admitted. No two cells share random numbers. The former rule
is shown beside ours: it admits a candidate that is above the default of one seed by no more than
two deviations of three seeds and 1 % of the loss.

    python benchmarks/noninferiority.py
    python benchmarks/noninferiority.py --trainings 200 --output noninferiority.csv
    python benchmarks/noninferiority.py --show noninferiority.csv

No cluster. It goes on where it was stopped.
"""

from __future__ import annotations

import csv
import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np
from command_line import add_table, commit_now, new_parser, open_table, parse
from rich.console import Console
from rich.table import Table

from hvd_autosync.search_space import Strategy
from hvd_autosync.study.noninferiority import MOST_JUDGED, Outcome
from hvd_autosync.study.quality import SEEDS, QualityCheck
from hvd_autosync.study.quality_trial import QualityTrial
from hvd_autosync.study.verdict import Verdict

KINDS = ("normal", "heavy", "correlated", "epochs", "skewed", "exponential", "rare")
SPREADS, DIFFERENCES = (0.25, 0.5, 1.0), (0.0, 0.5, 1.0, 2.0)
#: Spreads and deviations of cells whose default falls differently with each seed.
FALL_SPREADS, FALL_DEVIATIONS = (0.1, 0.25), (0.1, 0.22)
STEPS, TOLERANCE = 200, 0.01
#: Of the default's loss: what is left of it in the end, and deviations of a seed and of a batch.
LEVEL, SEED_NOISE, BATCH_NOISE = 1.0, 0.01, 0.05
COLUMNS = (
    "commit",
    "what",
    "kind",
    "spread",
    "difference",
    "fall_deviation",
    "count",
    "admitted",
    "worse",
    "not_shown",
    "pairs",
    "former_rule",
)
_DEFAULT = Strategy()
#: A candidate's noise of steps, as a share of its spread times the root of judged steps.
_WITHIN = 0.5
#: Share of trainings that are off, of the kind ``rare``.
_RARE = 0.1

Losses = tuple[float, ...]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Cell:
    """What a row of the table simulates.

    Attributes:
        what: Whether single candidates are judged (``"candidate"``) or studies (``"study"``).
        kind: One of ``KINDS``.
        spread: Standard deviation of a pair's difference, in tolerances.
        difference: Of candidates, in tolerances.
        fall_deviation: Standard deviation of the default's fall over seeds, as a share of it.
    """

    what: str
    kind: str
    spread: float
    difference: float
    fall_deviation: float = 0.0


class Trainings:
    """Losses of one simulated job.

    Args:
        cell: How they are simulated.
        number: Which job; the same one of a cell has the same losses.
    """

    def __init__(self, cell: Cell, number: int) -> None:
        self._cell, self._number = cell, number
        self._key = tuple(repr(cell).encode())
        # What the default falls by: from the first twentieth of its steps to the last quarter.
        self._falling = np.exp(-np.arange(STEPS) / 20)
        fall = float(self._falling[: STEPS // 20].mean() - self._falling[-STEPS // 4 :].mean())
        self._spread = cell.spread * TOLERANCE * fall
        self._difference = cell.difference * TOLERANCE * fall

    def losses(self, candidate: int | None, seed: int) -> Losses:
        """Of the default (``None``), or of a candidate, which meets the same batches."""
        batches = self._dice(seed)
        falls = 1 + self._cell.fall_deviation * batches.normal()
        losses = LEVEL + falls * self._falling + batches.normal(0, SEED_NOISE)
        losses = losses + batches.normal(0, BATCH_NOISE, STEPS)
        if candidate is not None:
            own = self._dice(seed, 1 + candidate)
            losses = losses + self._planted(own) + self._own_noise(own)
        return tuple(map(float, losses))

    def _dice(self, *which: int) -> np.random.Generator:
        return np.random.default_rng((self._number, *which, *self._key))

    def _planted(self, own: np.random.Generator) -> float:
        """How much worse a candidate's training is, but for noise."""
        if self._cell.kind != "rare":
            return self._difference
        return self._difference / _RARE if own.random() < _RARE else 0.0

    def _own_noise(self, own: np.random.Generator) -> Floats:
        """Noise of a candidate's whole training, and of its steps."""
        kind = self._cell.kind
        within = 0.0 if kind == "exponential" else _WITHIN
        scale = within * np.sqrt(STEPS / 4)
        whole, steps = own.normal(), own.normal(0, 1, STEPS)
        if kind == "heavy":
            whole = own.standard_t(3) / np.sqrt(3)
            steps = own.standard_t(3, STEPS) / np.sqrt(3)
        elif kind == "correlated":
            for step in range(1, STEPS):
                steps[step] = 0.95 * steps[step - 1] + np.sqrt(1 - 0.95**2) * steps[step]
            scale /= np.sqrt(1.95 / 0.05)
        elif kind == "epochs":
            steps = np.tile(steps[:40], STEPS // 40)
            scale /= np.sqrt(50 / 40)
        elif kind in ("skewed", "exponential"):
            whole = own.exponential() - 1
        noise = np.sqrt(1 - within**2) * whole + scale * steps
        return np.asarray(self._spread * noise)


def judge(trainings: Trainings, candidates: int) -> list[Verdict]:
    """The verdicts on candidates, judged in turn until one is admitted."""
    names = [Strategy({"large_codec": str(number)}) for number in range(candidates)]
    trials: list[QualityTrial] = []

    def check() -> QualityCheck:
        return QualityCheck(
            _DEFAULT, names, trials, first_untried, steps=STEPS, tolerance=TOLERANCE
        )

    while (wanted := check().next()) is not None:
        strategy, seed = wanted
        candidate = None if strategy == _DEFAULT else names.index(strategy)
        trials.append(QualityTrial(strategy, seed, STEPS, trainings.losses(candidate, seed)))
    return check().verdicts()


def first_untried(untried: Sequence[Strategy], verdicts: Sequence[Verdict]) -> Strategy | None:
    """The next candidate, until one may be used."""
    return None if any(verdict.admissible for verdict in verdicts) else untried[0]


def formerly_admitted(trainings: Trainings) -> bool:
    """Whether the former rule admits the first candidate."""
    last = [statistics.fmean(trainings.losses(None, seed)[-STEPS // 4 :]) for seed in SEEDS[:3]]
    own = statistics.fmean(trainings.losses(0, SEEDS[0])[-STEPS // 4 :])
    return own <= last[0] + 2 * statistics.stdev(last) + 0.01 * abs(last[0])


def measured(cell: Cell, count: int) -> list[object]:
    """One row of the table, but for the commit."""
    outcomes: Counter[Outcome] = Counter()
    pairs, former = 0, 0
    for number in range(count):
        trainings = Trainings(cell, number)
        verdicts = judge(trainings, MOST_JUDGED if cell.what == "study" else 1)
        admitted = any(verdict.admissible for verdict in verdicts)
        outcomes[Outcome.ADMITTED if admitted else verdicts[-1].outcome] += 1
        pairs += sum(verdict.pairs for verdict in verdicts)
        former += formerly_admitted(trainings)
    return [*astuple(cell), count, *(outcomes[each] for each in Outcome), pairs / count, former]


def cells() -> Iterator[Cell]:
    """All rows of the table."""
    for kind, spread, difference in itertools.product(KINDS, SPREADS, DIFFERENCES):
        yield Cell("candidate", kind, spread, difference)
    for kind, spread in itertools.product(KINDS, SPREADS):
        yield Cell("study", kind, spread, 1.0)
    for deviation, spread in itertools.product(FALL_DEVIATIONS, FALL_SPREADS):
        yield Cell("candidate", "normal", spread, 0.0, deviation)
        yield Cell("candidate", "normal", spread, 1.0, deviation)
        yield Cell("study", "normal", spread, 1.0, deviation)


def show(path: str) -> None:
    """Print the table of a file."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    table = Table(box=None, header_style="dim", pad_edge=False, collapse_padding=True)
    for column in (
        "what",
        "kind",
        "spread",
        "planted",
        "fall",
        "admitted",
        "worse",
        "not shown",
        "pairs",
        "former",
    ):
        table.add_column(column, justify="left" if column in ("what", "kind") else "right")
    for row in rows:
        count = int(row["count"])
        shares = [f"{int(row[name]) / count:.1%}" for name in ("admitted", "worse", "not_shown")]
        table.add_row(
            row["what"],
            row["kind"],
            row["spread"],
            row["difference"],
            row["fall_deviation"],
            *shares,
            f"{float(row['pairs']):.1f}",
            f"{int(row['former_rule']) / count:.1%}",
        )
    Console().print(table)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--trainings", type=int, default=400, help="candidates or studies per cell")
    add_table(parser, "noninferiority.csv", "one row per cell")
    arguments = parse(parser, show)
    output = open_table(parser, arguments, COLUMNS, goes_on=True)
    with open(output, newline="") as file:
        names = COLUMNS[1:6]
        done = {tuple(row[name] for name in names) for row in csv.DictReader(file)}
    commit = commit_now()
    for cell in cells():
        if tuple(map(str, astuple(cell))) in done:
            continue
        row = measured(cell, arguments.trainings)
        with open(output, "a", newline="") as file:
            csv.writer(file).writerow([commit, *row])
        print(*row, sep=" | ", flush=True)
    show(output)


if __name__ == "__main__":
    main()
