"""Does what is tuned make whole trainings shorter, and are their models as good?

Two examples are tuned between two hosts, which this machine imitates (``hvd_autosync.testing``;
needs root): once with exact strategies only, once with ``--autosync-allow codec,schedule``. Then
whole trainings with several seeds run as they are and under both winners, in turn. The time is that
between the first and the last report of a training; the metric is its last one.

    python benchmarks/whole_trainings.py
    python benchmarks/whole_trainings.py --examples digits --seeds 1 --output whole.csv
    python benchmarks/whole_trainings.py --show whole.csv

What the second tuning says of time and loss, its Pareto front among it, is printed as it ends.
About 40 minutes; leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from command_line import add_table, need_hosts, new_parser, open_table, parse
from rich.console import Console
from rich.table import Table

from hvd_autosync.search_space.exchange_plan import parameter_classes
from hvd_autosync.search_space.strategy_file import strategy_text
from hvd_autosync.testing import Testbed
from hvd_autosync.traces import TraceStore

_FOLDER = Path(__file__).resolve().parents[1] / "examples"
_BIN = Path(sys.executable).parent
_HOSTS = 2
_COLUMNS = ("example", "strategy", "seed", "train_s", "metric", "knobs")
#: Name of a tuning -> what is allowed in it.
_TUNINGS = {"exact winner": "", "winner of all": "codec,schedule"}


@dataclass(frozen=True)
class Example:
    """One training.

    Attributes:
        script: File name in ``examples/``.
        arguments: Its arguments, but for the seed.
        metric: What its reports are read with.
        better: 1 where larger is better, else -1.
    """

    script: str
    arguments: str
    metric: str
    better: int

    def command(self, seed: int) -> list[str]:
        """What ``horovodrun`` gets."""
        script = [sys.executable, str(_FOLDER / self.script), *self.arguments.split()]
        return [*script, "--seed", str(seed)]


EXAMPLES = {
    "digits": Example(
        "train_digits.py", "--hidden 256 --epochs 28", r"test accuracy ([\d.]+)%", 1
    ),
    "lm": Example(
        "train_lm.py", "--width 64 --depth 2 --heads 2 --context 32 --batch-size 4 --epochs 6",
        r"held-out ([\d.]+) bits", -1,
    ),
}  # fmt: skip


def tune(bed: Testbed, example: Example, allow: str, store: str, trials: int) -> str:
    """The file of the winner of a tuning; empty where the default is kept."""
    allowed = ["--autosync-allow", allow] if allow else []
    command = [
        str(_BIN / "horovodrun"), *bed.horovodrun_options(), "--gloo", "--autosync",
        "--autosync-tune-only", "--autosync-trials", str(trials), "--autosync-steps", "16",
        "--autosync-warmup", "5", "--autosync-store", store, *allowed, *example.command(1),
    ]  # fmt: skip
    done = bed.run(command, env=dict(os.environ), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"tuning ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    show_command = [str(_BIN / "hvd-autosync"), "show", "last", "--store", store]
    print(subprocess.run(show_command, capture_output=True, text=True).stdout, flush=True)
    study = TraceStore(store).study("last")
    assert study.winner is not None and study.space is not None and study.task is not None
    if study.winner == study.space.default:
        return ""
    return strategy_text(study.winner, parameter_classes(study.task.model))


def train(bed: Testbed, example: Example, seed: int, file: str) -> tuple[float, float]:
    """One whole training: its seconds and its last metric."""
    line = [*bed.horovodrun_options(), "--gloo"]
    command = [str(_BIN / "horovodrun"), *line]
    if file:
        command = [str(_BIN / "hvd-autosync"), "run", "--strategy", file, *line, "--"]
    reports = []
    with bed.popen(
        [*command, *example.command(seed)], env=dict(os.environ), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        for text in process.stdout:
            if found := re.search(example.metric, text):
                reports.append((time.perf_counter(), float(found[1])))
        errors = process.stderr.read()
    if process.returncode or len(reports) < 2:
        sys.exit(f"a training ended with status {process.returncode}:\n{errors[-4000:]}")
    for said in re.findall("hvd-autosync: .*", errors):
        print(f"    {said}", flush=True)
    return reports[-1][0] - reports[0][0], reports[-1][1]


def show(output: str) -> None:
    """Print the tables of a file of measurements."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    console = Console(width=None if sys.stdout.isatty() else 130)
    for name in dict.fromkeys(row["example"] for row in rows):
        own = [row for row in rows if row["example"] == name]
        table = Table(title=f"{name}: whole trainings, medians of time, means of the metric")
        for column in ("strategy", "seeds", "train s", "speed-up", "metric", "knobs"):
            table.add_column(column)
        default = {row["seed"]: float(row["train_s"]) for row in own if row["knobs"] == ""}
        for strategy in dict.fromkeys(row["strategy"] for row in own):
            these = [row for row in own if row["strategy"] == strategy]
            seconds = [float(row["train_s"]) for row in these]
            ratios = [default[row["seed"]] / float(row["train_s"]) for row in these]
            metrics = [float(row["metric"]) for row in these]
            spread = f" ± {statistics.stdev(metrics):.3g}" if len(metrics) > 1 else ""
            table.add_row(
                strategy, str(len(these)), f"{statistics.median(seconds):.1f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})",
                f"{statistics.fmean(metrics):.4g}{spread}", these[0]["knobs"],
            )  # fmt: skip
        console.print(table)


def main() -> None:
    """Runs the benchmark, or shows a former one."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--examples", default=",".join(EXAMPLES), metavar="E,...", help="(default: %(default)s)")
    add("--seeds", type=int, default=3, help="whole trainings of each (default: %(default)s)")
    add("--trials", type=int, default=14, help="of each tuning (default: %(default)s)")
    add("--rate", type=float, default=100.0, metavar="MBIT", help="(default: %(default)s)")
    add_table(parser, "whole.csv", "every training")
    args = parse(parser, show)
    need_hosts()
    output = open_table(parser, args, _COLUMNS)
    os.environ["OMP_NUM_THREADS"] = "1"
    with open(output, "a", newline="") as file, tempfile.TemporaryDirectory() as folder:
        writer = csv.writer(file)
        for name in args.examples.split(","):
            _play(name, args, Path(folder), writer)
            file.flush()
    show(output)


def _play(name: str, args: argparse.Namespace, folder: Path, writer: csv._writer) -> None:
    """Tune one example, then train it."""
    example = EXAMPLES[name]
    files: dict[str, tuple[str, str]] = {"as it is": ("", "")}
    with Testbed(_HOSTS, args.rate) as bed:
        for tuning, allow in _TUNINGS.items():
            text = tune(bed, example, allow, str(folder / f"{name}-{tuning}.db"), args.trials)
            if text:
                path = folder / f"{name}-{tuning}.toml"
                path.write_text(text)
                knobs = re.findall(r"^(\w+ = [^\[\n]+)$", text, re.M)
                files[tuning] = (str(path), ", ".join(knobs))
        for seed in range(1, args.seeds + 1):
            for strategy, (file, knobs) in files.items():
                seconds, metric = train(bed, example, seed, file)
                row = (name, strategy, seed, f"{seconds:.3f}", metric, knobs)
                print(*row, sep=" | ", flush=True)
                writer.writerow(row)


if __name__ == "__main__":
    main()
