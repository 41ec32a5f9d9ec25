"""Which search finds the better proposal: ours, or BoTorch's optimizer of mixed spaces?

A state is what is known after some trials of a table in ``traces/``: the default, strategies spread
over the space, and good ones, with the step times that were measured. Our surrogate is fitted to
it once, without prior functions ("knobs") or with cost model and related tables ("priors"), and
both searches maximize its same ``qLogNoisyExpectedImprovement``: ours (a pool of candidates,
then local search knob by knob; ``hvd_autosync/learner/acquisition.py``), and
``optimize_acqf_mixed_alternating`` with 2, 8 or 20 restarts from 64, 256 or 1024 samples.

    python benchmarks/acquisition_search.py
    python benchmarks/acquisition_search.py --only lm-100mbit --seeds 1 --searches botorch-8
    python benchmarks/acquisition_search.py --show acquisition_search.csv

The value is the logarithm of the expected improvement at the strategy that would be tried, which is
BoTorch's point with each number moved to a value of its knob; differences are BoTorch's minus ours,
with a 90 % interval over the means of the tables. A strategy that was tried before counts for
BoTorch, and does not for ours, which never proposes one. Time is that of the processor, so other
load does little harm; of BoTorch's, "differences" is what it spends on derivatives of the inputs. A
file that exists already is gone on with.
"""

from __future__ import annotations

import csv
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from command_line import add_table, check_names, commit_now, new_parser, open_table, parse
from contest.alternating import OverCoordinates, alternating
from learners import TABLES, emulators, related_to
from mean_interval import mean_interval
from rich.console import Console
from rich.table import Table

from hvd_autosync.learner.acquisition import propose
from hvd_autosync.learner.gp import fit
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.points import FloatArray, distinct, encode_all, keys
from hvd_autosync.learner.problem import Problem
from hvd_autosync.learner.surrogate import Surrogate

_COLUMNS = (
    "commit",
    "table",
    "model",
    "observations",
    "seed",
    "search",
    "log_ei",
    "tried_before",
    "cpu_s",
    "differences_s",
)
OURS = "ours"
#: Name -> restarts and samples of BoTorch's optimizer.
SEARCHES = {"botorch-2": (2, 64), "botorch-8": (8, 256), "botorch-20": (20, 1024)}
MODELS = ("knobs", "priors")
#: Differences of log EI, a factor of 1.05 on EI, that count as better or worse.
_CLEARLY = 0.05
_LEVEL = 0.9

Row = dict[str, Any]


@dataclass(frozen=True)
class State:
    """What a search is given.

    Attributes:
        table: Name of the table.
        model: Of :data:`MODELS`.
        observations: How many trials are known.
        seed: Which of the table's trials, and the seed of the searches.
    """

    table: str
    model: str
    observations: int
    seed: int


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        log_ei: Logarithm of the expected improvement, itself in logarithms of the step time.
        tried_before: Whether the strategy was among the trials.
        cpu_s: Processor seconds.
        differences_s: Those that were spent on derivatives of the model's inputs.
    """

    log_ei: float
    tried_before: bool
    cpu_s: float
    differences_s: float


class Arena:
    """One state with its fitted surrogate."""

    def __init__(self, state: State) -> None:
        table = emulators(str(TABLES))[state.table]
        seen = table.small_study(state.observations, state.seed)
        problem = Problem(table.space)
        if state.model == "priors":
            problem = Problem(table.space, table.task, related_to(str(TABLES), state.table))
        self._seed = state.seed
        self._surrogate: Surrogate = fit(problem, seen)
        self._tried = distinct(encode_all(table.space, [one.strategy for one in seen]))
        # What the model computes once, for its first prediction, belongs to neither search.
        self._surrogate.joint_at(self._tried)
        self._surrogate.mean_at(self._tried)

    def search(self, name: str) -> Found:
        """Run one of the searches."""
        over = None
        began = time.process_time()
        if name == OURS:
            nothing = np.empty((0, self._tried.shape[1]))
            proposed = propose(self._surrogate, self._tried, nothing, self._seed)
            assert proposed is not None, "no table has so few strategies"
            point, score = proposed
        else:
            with isolated(self._seed):
                over = OverCoordinates(self._surrogate, self._tried, self._seed)
                point = alternating(over, *SEARCHES[name])
        cpu_s = time.process_time() - began
        value = self._log_ei(point)
        if name == OURS and not math.isclose(value, score, abs_tol=1e-6):
            raise RuntimeError(f"not the same function: {value} for a score of {score}")
        tried_before = bool(set(keys(point[np.newaxis])) & set(keys(self._tried)))
        return Found(value, tried_before, cpu_s, over.differences_s if over else 0.0)

    @cached_property
    def _acquisition(self) -> OverCoordinates:
        with isolated(self._seed), torch.no_grad():
            return OverCoordinates(self._surrogate, self._tried, self._seed)

    def _log_ei(self, point: FloatArray) -> float:
        with isolated(self._seed), torch.no_grad():
            coordinates = self._acquisition.coordinates.of(point[np.newaxis])
            return float(self._acquisition(coordinates.unsqueeze(-2)))


def measure(states: Sequence[State], searches: Sequence[str], output: str) -> None:
    """Run what is missing in the file, and append each row as it is there."""
    known = {(_state_of(row), row["search"]) for row in _rows(output)}
    commit = commit_now()
    for count, state in enumerate(states, start=1):
        missing = [name for name in (OURS, *searches) if (state, name) not in known]
        if not missing:
            continue
        arena = Arena(state)
        for name in missing:
            found = arena.search(name)
            row = (
                commit,
                state.table,
                state.model,
                state.observations,
                state.seed,
                name,
                f"{found.log_ei:.6f}",
                int(found.tried_before),
                f"{found.cpu_s:.4f}",
                f"{found.differences_s:.4f}",
            )
            with open(output, "a", newline="") as file:
                csv.writer(file).writerow(row)
        if sys.stderr.isatty() or count % 10 == 0:
            print(f"{count} of {len(states)} states", file=sys.stderr, flush=True)


def _rows(output: str) -> list[Row]:
    with open(output, newline="") as file:
        return list(csv.DictReader(file))


def _state_of(row: Row) -> State:
    return State(row["table"], row["model"], int(row["observations"]), int(row["seed"]))


def show(output: str) -> None:
    """Print the table of a file of searches."""
    found = {
        (_state_of(row), row["search"]): Found(
            float(row["log_ei"]),
            row["tried_before"] == "1",
            float(row["cpu_s"]),
            float(row["differences_s"]),
        )
        for row in _rows(output)
    }
    table = Table(title="against ours, on the same states; seconds of the processor are medians")
    for column in (
        "model",
        "observations",
        "search",
        "tables, states",
        f"log EI - ours ({_LEVEL:.0%})",
        "median",
        "better, worse",
        "tried before",
        "s (range)",
        "differences s",
        "ours s (range)",
    ):
        table.add_column(column)
    for model in MODELS:
        for observations in sorted({state.observations for state, _ in found}):
            for search in SEARCHES:
                pairs = [
                    (state, found[state, OURS], other)
                    for (state, name), other in found.items()
                    if (state.model, state.observations, name) == (model, observations, search)
                ]
                if pairs:
                    table.add_row(model, str(observations), search, *_cells(pairs))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _cells(pairs: Sequence[tuple[State, Found, Found]]) -> Iterator[str]:
    apart = [other.log_ei - own.log_ei for _, own, other in pairs]
    by_table: dict[str, list[float]] = {}
    for (state, _, _), difference in zip(pairs, apart, strict=True):
        by_table.setdefault(state.table, []).append(difference)
    yield f"{len(by_table)}, {len(pairs)}"
    yield _mean([statistics.fmean(values) for values in by_table.values()])
    yield f"{statistics.median(apart):+.3f}"
    better = statistics.fmean(difference > _CLEARLY for difference in apart)
    worse = statistics.fmean(difference < -_CLEARLY for difference in apart)
    yield f"{better:.0%}, {worse:.0%}"
    yield f"{statistics.fmean(other.tried_before for _, _, other in pairs):.0%}"
    yield _seconds([other.cpu_s for _, _, other in pairs])
    yield f"{statistics.median(other.differences_s for _, _, other in pairs):.2f}"
    yield _seconds([own.cpu_s for _, own, _ in pairs])


def _mean(values: Sequence[float]) -> str:
    """The mean, and its interval from Student's distribution if there are several values."""
    mean, low, high = mean_interval(values, _LEVEL)
    return f"{mean:+.3f}" if math.isnan(low) else f"{mean:+.3f} ({low:+.3f} .. {high:+.3f})"


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} .. {max(values):.2f})"


def main() -> None:
    """Run the benchmark."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--only", metavar="T,...", help="of the tables, take these")
    add("--models", default=",".join(MODELS), metavar="M,...", help="(default: %(default)s)")
    add("--searches", default=",".join(SEARCHES), metavar="S,...", help="(default: %(default)s)")
    add("--observations", default="5,20,50", metavar="N,...", help="(default: %(default)s)")
    add("--seeds", type=int, default=3, help="states of each kind (default: %(default)s)")
    add_table(parser, "acquisition_search.csv", "one row per search")
    arguments = parse(parser, show)
    os.environ["OMP_NUM_THREADS"] = "1"
    tables = list(emulators(str(TABLES)))
    if arguments.only:
        tables = check_names(parser, "tables", arguments.only, tables)
    models = check_names(parser, "models", arguments.models, MODELS)
    searches = check_names(parser, "searches", arguments.searches, list(SEARCHES))
    output = open_table(parser, arguments, _COLUMNS, goes_on=True)
    states = [
        State(table, model, int(count), seed)
        for seed in range(arguments.seeds)
        for table in tables
        for count in arguments.observations.split(",")
        for model in models
    ]
    measure(states, searches, output)
    show(output)


if __name__ == "__main__":
    main()
