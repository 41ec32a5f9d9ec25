"""What does a trial cost beyond the steps that it measures, and does warm measure what cold does?

Warm and cold trials of the same job under the same strategy take turns. The overhead is the time
from the order to the last process gone, less the steps themselves; what the script does before
its first step is still in it. The ratio is that of the step times, warm over cold, per round; that
of the fast steps compares the lower quartiles of the trials' steps, which other users of the
machine disturb less. Every second round begins with the cold trial.

    python benchmarks/trial_overhead.py
    python benchmarks/trial_overhead.py --settings loopback --rounds 20 --output overhead.csv

Two ranks run on one host, or on two hosts made of this machine (``hvd_autosync.testing.Testbed``;
needs root) whose links have the rate that the setting names. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import numpy as np
from command_line import new_parser
from rich.console import Console
from rich.table import Table

from hvd_autosync.engine.job_line import parse_words, read_job
from hvd_autosync.launch.cold import ColdRunner
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.user_script import user_script
from hvd_autosync.launch.warm import WarmRunner
from hvd_autosync.search_space import StepTime, Strategy, TrialResult, TrialSpec
from hvd_autosync.study.confirm import compare
from hvd_autosync.testing import Testbed, testbed_missing

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "synthetic_benchmark.py"
_JOB = "--model resnet --width 8 --depth 6 --size 16 --batch-size 8"
_STRATEGY = Strategy({"cycle_time_ms": 2.0})
_FIELDS = (
    "setting",
    "runner",
    "round",
    "status",
    "total_s",
    "steps_s",
    "overhead_s",
    "mean_s",
    "standard_error_s",
    "fast_s",
)


def measure(setting: str, words: list[str], rounds: int, output: str) -> None:
    """All rounds of one setting, appended to ``output``; runs where the setting is."""
    job, _ = read_job(parse_words(words), words)
    warm = WarmRunner(job, user_script(job.command))
    runners: dict[str, WarmRunner | ColdRunner] = {"warm": warm, "cold": ColdRunner(job)}
    run(warm, job)  # starts the servers and lets them learn the script's imports
    run(warm, job)
    for number in range(rounds):
        for name in sorted(runners, reverse=number % 2 == 0):
            runner = runners[name]
            result = run(runner, job)
            steps_s = max(sum(rank.step_s) for rank in result.ranks)
            time_s = result.step_time
            assert time_s is not None, result.reason
            row = (
                setting,
                name,
                number,
                result.status.value,
                result.total_s,
                steps_s,
                result.total_s - steps_s,
                time_s.mean_s,
                time_s.standard_error_s,
                float(np.quantile(result.measured_durations(), 0.25)),
            )
            with open(output, "a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(row)
            print(
                f"{setting}, round {number + 1} of {rounds}, {name}: "
                f"{row[6]:.2f} s + {steps_s:.2f} s",
                flush=True,
            )
    warm.close()


def run(runner: WarmRunner | ColdRunner, job: Job) -> TrialResult:
    """One trial."""
    spec = TrialSpec(uuid.uuid4().hex, _STRATEGY, warmup_steps=10, measured_steps=40)
    return runner.run(spec, Limits(), lambda progress: None)


def show(output: str) -> None:
    """The table of a CSV file."""
    with open(output, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, _FIELDS))
    table = Table(
        "setting",
        "runner",
        "overhead s",
        "of rounds",
        "whole trial s",
        "step ms",
        "warm / cold (90 % interval)",
        "fast steps",
        title="The cost of a trial",
    )
    for setting in dict.fromkeys(row["setting"] for row in rows):
        times: dict[str, list[StepTime]] = {}
        fast: dict[str, list[StepTime]] = {}
        for name in ("warm", "cold"):
            own = [r for r in rows if r["setting"] == setting and r["runner"] == name]
            times[name] = [
                StepTime(float(r["mean_s"]), float(r["standard_error_s"]), 40) for r in own
            ]
            fast[name] = [StepTime(float(r["fast_s"]), 0.0, 40) for r in own]
            overhead = [float(r["overhead_s"]) for r in own]
            cells = ["", ""]
            if name == "cold":
                # "Speed-up" of cold over warm is warm's step time over cold's.
                ratios = [compare(_STRATEGY, each["warm"], each["cold"]) for each in (times, fast)]
                cells = [f"{r.speedup:.3f} ({r.low:.3f} .. {r.high:.3f})" for r in ratios]
            table.add_row(
                setting,
                name,
                f"{statistics.median(overhead):.2f}",
                f"{min(overhead):.2f} .. {max(overhead):.2f}",
                f"{statistics.median(float(r['total_s']) for r in own):.2f}",
                f"{1e3 * statistics.median(t.mean_s for t in times[name]):.1f}",
                *cells,
            )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> None:
    """Runs the benchmark, or the part of it that runs inside a setting."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--settings",
        default="loopback,200mbit",
        metavar="S,...",
        help="loopback, or rates (default: %(default)s)",
    )
    parser.add_argument(
        "--job", default=_JOB, metavar="OPTIONS", help="of the example (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--output", metavar="FILE", help="keep every trial as CSV; a new file")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        measure(**json.loads(args.inside))
        return
    if args.output and os.path.exists(args.output):
        parser.error(f"{args.output} exists already; name another")
    with tempfile.TemporaryDirectory(prefix="trial-overhead-") as folder:
        run_all(args, args.output or os.path.join(folder, "overhead.csv"))


def run_all(args: argparse.Namespace, output: str) -> None:
    """All settings, then the table."""
    for setting in args.settings.split(","):
        rate = math.nan if setting == "loopback" else float(setting.removesuffix("mbit"))
        options = ["-np", "2"] if math.isnan(rate) else Testbed(2).horovodrun_options()
        script = [sys.executable, str(_EXAMPLE), *args.job.split(), "--steps", "1000000"]
        plan = {
            "setting": setting,
            "words": [*options, "--gloo", *script],
            "rounds": args.rounds,
            "output": output,
        }
        command = [sys.executable, os.path.abspath(__file__), "--inside", json.dumps(plan)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if math.isnan(rate):
            subprocess.run(command, env=environment, check=True)
        elif missing := testbed_missing():
            print(f"{setting} is left out: {missing}")
        else:
            with Testbed(2, rate) as bed:
                bed.run(command, env=environment, check=True)
    show(output)


if __name__ == "__main__":
    main()
