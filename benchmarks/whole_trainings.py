"""Are whole trainings under the tuned strategies shorter, and their models as good?

Trainings are tuned between two hosts, which this machine imitates (``hvd_autosync.testing``;
needs root), at two rates: once with exact strategies only, once with ``--autosync-allow
codec,schedule``. Then whole trainings with several seeds run as they are and under both winners, in
turn. The time is that between the first and the last report of a training; the metric is its last
one. It may be worse by a margin that is stated beforehand: half a point of accuracy for the digits,
elsewhere 1 % of what the default's metric has come from.

    python benchmarks/whole_trainings.py --output whole.csv
    python benchmarks/whole_trainings.py --examples digits --rates 100 --seeds 1
    python benchmarks/whole_trainings.py --show whole.csv

For each judged candidate the result of the former rule is shown, too: it admits a candidate that is
above the default of one seed by no more than two deviations of three seeds and 1 % of the loss.

An existing output file is continued. Half an hour or more for each example and rate, judging
included; leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import (
    add_table,
    check_names,
    commit_now,
    need_hosts,
    new_parser,
    open_table,
    parse,
)
from mean_interval import mean_interval
from rich.console import Console
from rich.table import Table

from hvd_autosync.search_space.exchange_plan import parameter_classes
from hvd_autosync.search_space.strategy_file import strategy_text
from hvd_autosync.study.quality_trial import losses_of
from hvd_autosync.study.values import Conclusion
from hvd_autosync.testing import Testbed
from hvd_autosync.traces import StudyRecord, TraceStore

_FOLDER = Path(__file__).resolve().parents[1] / "examples"
_BIN = Path(sys.executable).parent
_HOSTS = 2
_COLUMNS = (
    "commit",
    "rate_mbit",
    "example",
    "what",
    "strategy",
    "seed",
    "train_s",
    "metric",
    "text",
    "minutes",
    "judging_minutes",
    "judged",
)
_AS_IT_IS = "as it is"
#: Name of a tuning -> what is allowed in it.
_TUNINGS = {"exact winner": "", "winner of all": "codec,schedule"}

Row = dict[str, str]


@dataclass(frozen=True)
class Example:
    """One training.

    Attributes:
        script: File name in ``examples/``.
        arguments: Its arguments, but for the seed.
        metric: What its reports are read with.
        better: 1 where larger is better, else -1.
        from_: The metric of a model that has learned nothing.
        margin: How much worse the metric may be; 0: 1 % of the way from there to the default's.
    """

    script: str
    arguments: str
    metric: str
    better: int
    from_: float
    margin: float = 0.0

    def command(self, seed: int) -> list[str]:
        """What ``horovodrun`` gets."""
        script = [sys.executable, str(_FOLDER / self.script), *self.arguments.split()]
        return [*script, "--seed", str(seed)]

    def may_lose(self, default: float) -> float:
        """The margin, beside the default's metric."""
        return self.margin or 0.01 * abs(default - self.from_)


_BITS = r"held-out ([\d.]+) bits"
EXAMPLES = {
    "digits": Example(
        "train_digits.py", "--hidden 256 --epochs 28", r"test accuracy ([\d.]+)%", 1, 10.0, 0.5
    ),
    # As VGG, with most parameters in one matrix.
    "digits-2048": Example(
        "train_digits.py", "--hidden 2048 --epochs 10", r"test accuracy ([\d.]+)%", 1, 10.0, 0.5
    ),
    "lm": Example(
        "train_lm.py",
        "--width 64 --depth 2 --heads 2 --context 32 --batch-size 4 --epochs 6",
        _BITS,
        -1,
        8.0,
    ),
    "ncf": Example("train_ncf.py", "--factors 8 --epochs 4", r"rate@10 ([\d.]+)", 1, 0.1),
    "autocast": Example(
        "train_lm.py",
        "--autocast --width 96 --depth 1 --heads 2 --context 32 --batch-size 4 --epochs 6",
        _BITS,
        -1,
        8.0,
    ),
}


def tune(bed: Testbed, example: Example, allow: str, store: str, trials: int) -> StudyRecord:
    """A finished tuning."""
    allowed = ["--autosync-allow", allow] if allow else []
    command = [
        str(_BIN / "horovodrun"),
        *bed.horovodrun_options(),
        "--gloo",
        "--autosync",
        "--autosync-tune-only",
        "--autosync-trials",
        str(trials),
        "--autosync-store",
        store,
        *allowed,
        *example.command(1),
    ]
    done = bed.run(command, env=dict(os.environ), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"tuning ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    show_command = [str(_BIN / "hvd-autosync"), "show", "last", "--store", store]
    print(subprocess.run(show_command, capture_output=True, text=True).stdout, flush=True)
    return TraceStore(store).study("last")


def of_tuning(study: StudyRecord, store: str) -> dict[str, Any]:
    """What is written down of a tuning."""
    assert study.winner is not None and study.space is not None and study.task is not None
    conclusion = Conclusion.of(study)
    assert conclusion is not None, "it has ended"
    trials = TraceStore(store).trials(study.study_id)
    seconds = {
        kind: math.fsum(t.result.total_s for t in trials if t.result and t.kind == kind)
        for kind in {trial.kind for trial in trials}
    }
    default = [t for t in trials if t.kind == "quality" and t.strategy == study.space.default]
    judged = []
    for verdict in conclusion.verdicts:
        own = [t for t in trials if t.kind == "quality" and t.strategy == verdict.strategy]
        ends = [[_end(losses_of(t.result)) for t in some if t.result] for some in (default, own)]
        formerly = (
            len(ends[0]) > 2
            and bool(ends[1])
            and (
                ends[1][0]
                <= ends[0][0] + 2 * statistics.stdev(ends[0][:3]) + 0.01 * abs(ends[0][0])
            )
        )
        judged.append([study.space.describe(verdict.strategy), verdict.outcome.value, formerly])
    kept = study.winner == study.space.default
    return {
        "text": "" if kept else strategy_text(study.winner, parameter_classes(study.task.model)),
        "minutes": f"{math.fsum(seconds.values()) / 60:.2f}",
        "judging_minutes": f"{seconds.get('quality', 0.0) / 60:.2f}",
        "judged": json.dumps(judged),
    }


def _end(losses: tuple[float, ...]) -> float:
    """Mean of the last quarter."""
    return statistics.fmean(losses[-max(len(losses) // 4, 1) :]) if losses else math.inf


def train(bed: Testbed, example: Example, seed: int, file: str) -> tuple[float, float]:
    """One whole training: its seconds and its last metric."""
    line = [*bed.horovodrun_options(), "--gloo"]
    command = [str(_BIN / "horovodrun"), *line]
    if file:
        command = [str(_BIN / "hvd-autosync"), "run", "--strategy", file, *line, "--"]
    reports = []
    with bed.popen(
        [*command, *example.command(seed)],
        env=dict(os.environ),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None, "both are pipes"
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
    console = Console(width=None if sys.stdout.isatty() else 150)
    for rate, name in dict.fromkeys((row["rate_mbit"], row["example"]) for row in rows):
        own = [row for row in rows if (row["rate_mbit"], row["example"]) == (rate, name)]
        trained = [row for row in own if row["what"] == "training"]
        if not trained:
            continue
        example = EXAMPLES[name]
        default = {row["seed"]: row for row in trained if row["strategy"] == _AS_IT_IS}
        level = statistics.fmean(float(row["metric"]) for row in default.values())
        table = Table(
            title=f"{name}, {rate} Mbit/s: whole trainings; the metric may be worse by "
            f"{example.may_lose(level):.3g}"
        )
        for column in (
            "strategy",
            "seeds",
            "train s",
            "speed-up",
            "metric",
            "worse by (90 % interval)",
            "knobs",
        ):
            table.add_column(column)
        texts = {row["strategy"]: row["text"] for row in own if row["what"] == "tuning"}
        for strategy in dict.fromkeys(row["strategy"] for row in trained):
            these = [row for row in trained if row["strategy"] == strategy]
            seconds = [float(row["train_s"]) for row in these]
            ratios = [
                float(default[row["seed"]]["train_s"]) / float(row["train_s"])
                for row in these
                if row["seed"] in default
            ]
            worse = [
                example.better * (float(default[row["seed"]]["metric"]) - float(row["metric"]))
                for row in these
                if row["seed"] in default
            ]
            knobs = re.findall(r"^(\w+ = [^\[\n]+)$", texts.get(strategy, ""), re.M)
            table.add_row(
                strategy,
                str(len(these)),
                f"{statistics.median(seconds):.1f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})",
                f"{statistics.fmean(float(row['metric']) for row in these):.4g}",
                "" if strategy == _AS_IT_IS else _interval(worse),
                ", ".join(knobs),
            )
        console.print(table)
        for row in own:
            if row["what"] == "tuning":
                _tell_tuning(console, row)


def _interval(values: list[float]) -> str:
    mean, low, high = mean_interval(values, 0.9)
    return f"{mean:.3g}" if math.isnan(low) else f"{mean:.3g} ({low:.3g}..{high:.3g})"


def _tell_tuning(console: Console, row: Row) -> None:
    console.print(
        f"{row['strategy']}: {row['minutes']} minutes, of these judging {row['judging_minutes']}",
        highlight=False,
    )
    for what, outcome, formerly in json.loads(row["judged"]):
        rule = "admits it, too" if outcome == "admitted" else "would have admitted it"
        former = f"; the former rule {rule}" if formerly else "; the former rule refuses it"
        console.print(f"    {what}: {outcome}{former}", highlight=False)


def main() -> None:
    """Runs the benchmark, or shows a former one."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--examples", default=",".join(EXAMPLES), metavar="E,...", help="(default: %(default)s)")
    add("--tunings", default=",".join(_TUNINGS), metavar="T,...", help="(default: %(default)s)")
    add("--seeds", type=int, default=5, help="whole trainings of each (default: %(default)s)")
    add("--trials", type=int, default=14, help="of each tuning (default: %(default)s)")
    add("--rates", default="100,1000", metavar="MBIT,...", help="(default: %(default)s)")
    add_table(parser, "whole.csv", "every tuning and training")
    args = parse(parser, show)
    names = check_names(parser, "examples", args.examples, list(EXAMPLES))
    tunings = check_names(parser, "tunings", args.tunings, list(_TUNINGS))
    need_hosts()
    output = open_table(parser, args, _COLUMNS, goes_on=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        for rate in args.rates.split(","):
            for name in names:
                _Play(name, rate, tunings, args, output, Path(folder)).play()
    show(output)


class _Play:
    """One example at one rate: tune it, then train it; what is in the file is left out."""

    def __init__(
        self,
        name: str,
        rate: str,
        tunings: list[str],
        args: argparse.Namespace,
        output: str,
        folder: Path,
    ) -> None:
        self._tunings = tunings
        self._name, self._rate, self._args = name, rate, args
        self._output, self._folder = output, folder
        with open(output) as file:
            self._rows = [
                row
                for row in csv.DictReader(file)
                if (row["rate_mbit"], row["example"]) == (rate, name)
            ]

    def play(self) -> None:
        """All of it."""
        example = EXAMPLES[self._name]
        with Testbed(_HOSTS, float(self._rate)) as bed:
            files = {_AS_IT_IS: ""}
            for tuning in self._tunings:
                allow = _TUNINGS[tuning]
                row = self._find("tuning", tuning, "")
                if row is None:
                    store = str(self._folder / f"{self._name}-{self._rate}-{tuning}.db")
                    study = tune(bed, example, allow, store, self._args.trials)
                    row = self._add("tuning", tuning, "", **of_tuning(study, store))
                if row["text"]:
                    path = self._folder / f"{self._name}-{self._rate}-{tuning}.toml"
                    path.write_text(row["text"])
                    files[tuning] = str(path)
            for seed in range(1, self._args.seeds + 1):
                for strategy, file in files.items():
                    if self._find("training", strategy, str(seed)) is None:
                        seconds, metric = train(bed, example, seed, file)
                        self._add(
                            "training",
                            strategy,
                            str(seed),
                            train_s=f"{seconds:.3f}",
                            metric=f"{metric:g}",
                        )

    def _find(self, what: str, strategy: str, seed: str) -> Row | None:
        key = (what, strategy, seed)
        return next((r for r in self._rows if (r["what"], r["strategy"], r["seed"]) == key), None)

    def _add(self, what: str, strategy: str, seed: str, **more: str) -> Row:
        head = (commit_now(), self._rate, self._name, what, strategy, seed)
        row = {**dict.fromkeys(_COLUMNS, ""), **dict(zip(_COLUMNS, head, strict=False)), **more}
        self._rows.append(row)
        with open(self._output, "a", newline="") as file:
            csv.DictWriter(file, _COLUMNS).writerow(row)
        print(*head[1:], more.get("train_s", ""), more.get("metric", ""), sep=" | ", flush=True)
        return row


if __name__ == "__main__":
    main()
