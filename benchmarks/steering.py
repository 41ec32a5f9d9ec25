"""Does a study find a lossy strategy that may be used, or judge what is fast and bad?

Whole studies with ``--autosync-allow codec,schedule``, with the learner, the test of losses and the
confirmation as they are; only the cluster is simulated. A step takes what the cost model says of a
task that was measured once (``traces/``), times a smooth error that the study does not know; losses
fall, and lie above the default's by what each lossy knob adds, in tolerances, times the training's
sensitivity. Seeds of a training differ, and pairs by half a tolerance.

A study reaches its goal where its winner saves at least 70 % of what the fastest strategy saves
that may be used, with at most six judged. "fastest first" judges by speed alone, whatever was
refused before.

    python benchmarks/steering.py --seeds 2 --tasks lm-100mbit
    python benchmarks/steering.py --output steering.csv
    python benchmarks/steering.py --show steering.csv
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
import time
from functools import cached_property
from pathlib import Path
from unittest import mock

import numpy as np
from command_line import add_table, check_names, commit_now, new_parser, open_table, parse
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hvd_autosync.cost import CostModel
from hvd_autosync.learner.points import FloatArray, distinct, encode_all, sobol_points
from hvd_autosync.learner.pool import one_knob_away
from hvd_autosync.learner.quality_constraint import QualityConstraint
from hvd_autosync.search_space import (
    RankReport,
    SearchSpace,
    Strategy,
    TrialResult,
    TrialStatus,
    build_space,
)
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import TraceStore, import_studies

_TABLES = Path(__file__).resolve().parent / "traces"
_TASKS = ("lm-100mbit", "ncf-100mbit", "bert-100mbit", "vgg-300mbit")
#: How much worse each lossy knob makes a training, as a multiple of what it does to a medium one.
_SENSITIVITY = {"low": 0.3, "medium": 1.0, "high": 3.0}
_WAYS = ("as it is", "fastest first")
_COLUMNS = (
    "commit",
    "task",
    "sensitivity",
    "way",
    "seed",
    "judged",
    "admitted",
    "speedup",
    "best_speedup",
    "minutes",
    "winner",
)
_GOAL, _MOST_JUDGED = 0.7, 6
#: The cost model's error (deviation of the logarithm), and that of a trial.
_ERROR, _NOISE = 0.15, 0.02
#: Loss of the default at the beginning and at the end of a trial; deviations of seeds, in
#: tolerances, of all strategies together and of each pair; and of a step.
_FIRST, _LAST, _SEEDS, _PAIRS, _STEPS = 4.0, 2.0, 2.0, 0.5, 0.05
_TOLERANCE = 0.01 * (_FIRST - _LAST)
#: A strategy surely may be used if it is at most so many tolerances worse.
_SURE = 0.5


class Job:
    """One task whose step times and losses are known.

    Args:
        task: Name of its table.
        sensitivity: How many times worse a lossy knob makes this training than a medium one.
    """

    def __init__(self, task: str, sensitivity: float) -> None:
        store = TraceStore("sqlite://")
        (study_id,) = import_studies(store, _TABLES / f"{task}.jsonl.gz")
        found = store.study(study_id).task
        assert found is not None, "a survey has described it"
        self.task = found
        self.space: SearchSpace = build_space(
            found.model, found.resources, allow=("codec", "schedule")
        )
        self._sensitivity = sensitivity
        self._cost = CostModel(found.model, found.resources)
        dice = np.random.default_rng(sum(map(ord, task)))
        self._waves = dice.normal(0, 1.5, (64, self.space.dimension))
        self._phases = dice.uniform(0, 2 * math.pi, 64)

    def log_step(self, points: FloatArray) -> FloatArray:
        """True logarithm of the step time at points, ``n x d``: shape ``(n,)``."""
        strategies = [self.space.decode(point) for point in points]
        waves = np.cos(points @ self._waves.T + self._phases).mean(axis=1)
        error: FloatArray = _ERROR * math.sqrt(2 * 64) * waves
        return np.log(self._cost.predict(strategies)) + error

    def excess(self, strategy: Strategy) -> float:
        """Loss above the default's, in tolerances."""
        worse: float = 0.5 * math.log2(int(strategy.get("local_steps", 1))) ** 1.1
        for part, share in (("embedding", 0.5), ("large", 1.0), ("rest", 0.1)):
            codec = strategy.get(f"{part}_codec", "none")
            if codec == "topk":
                worse += share * 2.0 * (0.25 / float(strategy[f"{part}_ratio"])) ** 0.3
            elif codec == "powersgd":
                worse += share * 14.0 / int(strategy[f"{part}_rank"])
            else:
                worse += share * {"none": 0.0, "fp16": 0.01, "bf16": 0.03, "int8": 0.07}[str(codec)]
        return self._sensitivity * worse

    @cached_property
    def best_log_step(self) -> float:
        """That of the fastest strategy that may be used."""
        points = sobol_points(self.space, 4096, 0)
        points = np.concatenate([points, encode_all(self.space, [self.space.default])])
        for _ in range(12):
            feasible = [self.excess(self.space.decode(point)) <= _SURE for point in points]
            points = points[np.array(feasible)]
            points = points[np.argsort(self.log_step(points))[:60]]
            neighbours = one_knob_away(self.space, points, (0.3, 0.1, 0.03))
            points = distinct(np.concatenate([points, neighbours]))
        feasible = [self.excess(self.space.decode(point)) <= _SURE for point in points]
        return float(self.log_step(points[np.array(feasible)]).min())

    def saved(self, strategy: Strategy) -> float:
        """True speed-up over the default."""
        default, own = self.log_step(encode_all(self.space, [self.space.default, strategy]))
        return math.exp(default - own)

    @property
    def best_speedup(self) -> float:
        """Of the fastest strategy that may be used."""
        (default,) = self.log_step(encode_all(self.space, [self.space.default]))
        return math.exp(default - self.best_log_step)

    def run(
        self, strategy: Strategy, steps: int, seed: int, number: int, study: int
    ) -> TrialResult:
        """One trial."""
        launch = np.random.default_rng([study, number])
        (log_step,) = self.log_step(encode_all(self.space, [strategy]))
        step_s = np.exp(log_step + launch.normal(0, _NOISE) + launch.normal(0, 0.05, steps))
        progress = np.arange(steps) / steps
        losses = _LAST + (_FIRST - _LAST) * np.exp(-4 * progress)
        common = np.random.default_rng([seed, study, 1])
        losses += common.normal(0, _SEEDS * _TOLERANCE) + common.normal(0, _STEPS, steps)
        own = launch.normal(0, _PAIRS * _TOLERANCE) if not self.space.is_exact(strategy) else 0.0
        losses += np.minimum(5 * progress, 1) * (self.excess(strategy) * _TOLERANCE + own)
        length = int(strategy.get("local_steps", 1))
        report = RankReport(0, "host0", tuple(map(float, step_s)), losses=tuple(map(float, losses)))
        total = 1.0 + float(step_s.sum())
        return TrialResult(
            TrialStatus.COMPLETED,
            ranks=(report,),
            warmup_steps=0,
            setup_s=1.0,
            total_s=total,
            round_steps=length,
        )


def play(job: Job, way: str, seed: int) -> tuple[int, int, float, float, Strategy]:
    """One study: judged, admitted, the winner's speed-up, minutes of cluster time, the winner."""
    settings = StudySettings(allow=("codec", "schedule"), seed=seed, transfer=False)
    study = AskTellStudy.create(job.space, store="sqlite://", settings=settings, task=job.task)
    total_s = 0.0

    def even(self: QualityConstraint, points: FloatArray) -> FloatArray:
        return np.ones(len(points))

    with mock.patch.object(
        QualityConstraint, "at", even if way != _WAYS[0] else QualityConstraint.at
    ):
        while (trial := study.ask()) is not None:
            steps = trial.steps or settings.warmup + settings.steps
            result = job.run(trial.strategy, steps, trial.seed, trial.number, seed)
            total_s += result.total_s
            study.tell(trial, result)
    conclusion = study.conclusion
    assert conclusion is not None, "a study that asks for nothing more has ended"
    verdicts = conclusion.verdicts
    return (
        len(verdicts),
        sum(v.admissible for v in verdicts),
        job.saved(conclusion.winner),
        total_s / 60,
        conclusion.winner,
    )


def show(output: str) -> None:
    """Print the table of a file of studies."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    table = Table(title="simulated studies that allow codec and schedule, means over seeds")
    for column in (
        "task",
        "sensitivity",
        "way",
        "studies",
        "judged",
        "admitted",
        "speed-up",
        "best that may be used",
        "share of its gain",
        "reach 70 %",
        "minutes",
    ):
        table.add_column(column)
    cells: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in rows:
        cells.setdefault((row["task"], row["sensitivity"], row["way"]), []).append(row)
    for (task, sensitivity, way), own in cells.items():
        means = [
            statistics.fmean(float(row[c]) for row in own)
            for c in ("judged", "admitted", "speedup", "best_speedup", "minutes")
        ]
        shares = [_share(row) for row in own]
        reached = sum(
            share >= _GOAL and int(row["judged"]) <= _MOST_JUDGED
            for share, row in zip(shares, own, strict=True)
        )
        table.add_row(
            task,
            sensitivity,
            way,
            str(len(own)),
            f"{means[0]:.1f}",
            f"{means[1]:.1f}",
            f"{means[2]:.2f}",
            f"{means[3]:.2f}",
            f"{statistics.fmean(shares):.0%}",
            f"{reached} of {len(own)}",
            f"{means[4]:.0f}",
        )
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def _share(row: dict[str, str]) -> float:
    """Of the time that the best one saves, what the winner saves."""
    saved, most = (1 - 1 / float(row[column]) for column in ("speedup", "best_speedup"))
    return saved / most if most > 0 else 1.0


def main() -> None:
    """Runs the benchmark."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--tasks", default=",".join(_TASKS), metavar="T,...", help="(default: %(default)s)")
    add("--ways", default=",".join(_WAYS), metavar="W,...", help="(default: %(default)s)")
    add("--seeds", type=int, default=5, help="studies of each (default: %(default)s)")
    add_table(parser, "steering.csv", "every study")
    args = parse(parser, show)
    tasks = check_names(parser, "tasks", args.tasks, _TASKS)
    ways = check_names(parser, "ways", args.ways, _WAYS)
    output = open_table(parser, args, _COLUMNS, goes_on=True)
    with open(output) as file:
        known = {tuple(row[c] for c in _COLUMNS[1:5]) for row in csv.DictReader(file)}
    wanted = [
        (task, sensitivity, way, seed)
        for seed in range(args.seeds)
        for task in tasks
        for sensitivity in _SENSITIVITY
        for way in ways
        if (task, sensitivity, way, str(seed)) not in known
    ]
    commit = commit_now()
    for task, sensitivity, way, seed in track(wanted, "studies", disable=not sys.stderr.isatty()):
        job = Job(task, _SENSITIVITY[sensitivity])
        began = time.perf_counter()
        judged, admitted, speedup, minutes, winner = play(job, way, seed)
        row = (
            commit,
            task,
            sensitivity,
            way,
            seed,
            judged,
            admitted,
            f"{speedup:.4f}",
            f"{job.best_speedup:.4f}",
            f"{minutes:.2f}",
            dict(winner),
        )
        print(*row[1:-1], f"{time.perf_counter() - began:.0f} s", sep=" | ", flush=True)
        with open(output, "a", newline="") as file:
            csv.writer(file).writerow(row)
    show(output)


if __name__ == "__main__":
    main()
