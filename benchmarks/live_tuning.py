"""Is a training that is tuned in its own steps ahead, at every moment, of one that is tuned before?

Each training runs for a stated time in four ways, in turn: as it is; under Horovod's own
``--autotune``; tuned by launched trials, then trained; tuned live. Steps of the training (not of
launched trials) are counted against the wall clock, from the launch of the first process on. Hosts
and links between them are imitated on this machine (``hvd_autosync.testing``; needs root, but for
the setting ``loopback``).

    python benchmarks/live_tuning.py --output live.csv
    python benchmarks/live_tuning.py --examples digits --settings 100mbit --rounds 1 --seconds 120
    python benchmarks/live_tuning.py --show live.csv

An existing output file is continued. A cell takes the stated time; leave the machine alone
meanwhile.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from command_line import (
    add_table,
    check_names,
    commit_now,
    need_hosts,
    new_parser,
    open_table,
    own_part,
    parse,
    rates_of,
)
from ending import end_training
from gain.workloads import WORKLOADS
from rich.console import Console
from rich.table import Table

from hvd_autosync.testing import Testbed

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
_BIN = Path(sys.executable).parent
_COLUMNS = ("commit", "setting", "example", "round", "way", "set_up_s", "first_s", "steps_at")
#: Steps are counted up to each multiple of this, seconds.
_EVERY_S = 10
#: Those of ``tuning_gain.py``.
EXAMPLES = {name: f"{each.script} {each.arguments}" for name, each in WORKLOADS.items()}
_TRIALS = ["--autosync-trials", "8", "--autosync-expected-hours", "10"]
WAYS: dict[str, Sequence[str]] = {
    "as it is": (),
    "autotune": ("--autotune",),
    "launched": ("--autosync", "--autosync-mode", "launched", *_TRIALS),
    "live": ("--autosync", "--autosync-mode", "live", *_TRIALS),
}

Row = dict[str, str]


def train(example: str, marks: str, set_up_s: float) -> None:
    """A rank's part: the example, whose steps rank 0 writes down.

    Args:
        example: The example and its arguments.
        marks: The file for the moments of its steps, seconds of ``time.time``.
        set_up_s: A set-up that the script makes before anything else, seconds.
    """
    import runpy

    import torch

    import hvd_autosync

    time.sleep(set_up_s)
    backward = torch.Tensor.backward
    file = open(marks, "a", buffering=1)  # noqa: SIM115

    def marked(self: Any, *arguments: Any, **keywords: Any) -> None:
        if os.environ.get("HOROVOD_RANK") == "0" and not hvd_autosync.in_trial():
            file.write(f"{time.time():.4f}\n")
        backward(self, *arguments, **keywords)  # type: ignore[no-untyped-call]

    torch.Tensor.backward = marked  # type: ignore[method-assign]
    name, *words = example.split()
    sys.argv = [name, *words]
    sys.path.insert(0, str(_EXAMPLES))
    runpy.run_path(str(_EXAMPLES / name), run_name="__main__")


def run(bed: Testbed | None, way: str, script: str, seconds: float, set_up_s: float) -> list[float]:
    """Moments of the training's steps, seconds since the launch."""
    with tempfile.TemporaryDirectory(prefix="live-tuning-") as folder:
        marks = Path(folder, "marks")
        marks.touch()
        place = ["-np", "2"] if bed is None else bed.horovodrun_options(1)
        own = ["--autosync-store", f"{folder}/traces.db"] if "--autosync" in WAYS[way] else []
        part = own_part(__file__, example=script, marks=str(marks), set_up_s=set_up_s)
        command = [str(_BIN / "horovodrun"), *place, "--gloo", *WAYS[way], *own, *part]
        output = Path(folder, "output")
        with output.open("wb") as file:
            options: dict[str, Any] = {
                "env": {**os.environ, "OMP_NUM_THREADS": "1"},
                "stdout": file,
                "stderr": subprocess.STDOUT,
                "start_new_session": True,
            }
            began = time.time()
            launch = subprocess.Popen if bed is None else bed.popen
            job = launch(command, **options)
        try:
            status = job.wait(seconds)
        except subprocess.TimeoutExpired:
            end_training(job)
        except BaseException:
            end_training(job)  # a session of its own, which Ctrl-C does not reach
            raise
        else:
            sys.exit(f"{way}: the job has ended with status {status}\n{_last_lines(output)}")
        return [float(line) - began for line in marks.read_text().splitlines()]


def _last_lines(output: Path) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-20:])


def measure(arguments: argparse.Namespace, output: str, names: list[str]) -> None:
    """Run all cells that the output does not have."""
    done = {
        (r["setting"], r["example"], r["round"], r["way"], r["set_up_s"])
        for r in read(output)
        if len(r["steps_at"].split()) == int(arguments.seconds) // _EVERY_S
    }
    for setting, rate in arguments.settings.items():
        for round_ in range(arguments.rounds):
            for name in names:
                for way in WAYS:
                    key = (setting, name, str(round_), way, f"{arguments.set_up:g}")
                    if key in done:
                        continue
                    moments = _cell(rate, way, name, arguments)
                    steps_at = _counted(moments, arguments.seconds)
                    first = f"{moments[0]:.2f}" if moments else ""
                    row = [commit_now(), *key, first, " ".join(map(str, steps_at))]
                    with open(output, "a", newline="") as file:
                        csv.writer(file).writerow(row)
                    print(
                        f"{setting} {name} round {round_} {way}: {steps_at[-1]} steps", flush=True
                    )


def _cell(rate: float | None, way: str, name: str, arguments: argparse.Namespace) -> list[float]:
    script, seconds = EXAMPLES[name], arguments.seconds
    if rate is None:
        return run(None, way, script, seconds, arguments.set_up)
    with Testbed(2, rate) as bed:
        return run(bed, way, script, seconds, arguments.set_up)


def _counted(moments: Sequence[float], seconds: float) -> list[int]:
    """Steps until each multiple of ``_EVERY_S``."""
    ends = range(_EVERY_S, int(seconds) + 1, _EVERY_S)
    return [sum(moment <= end for moment in moments) for end in ends]


def read(path: str) -> list[Row]:
    """The rows of a file."""
    with open(path, newline="") as file:
        return [*csv.DictReader(file)]


def show(path: str) -> None:
    """Print steps over time, and when live tuning is ahead of the others for good."""
    rows = read(path)
    table = Table(title="steps of the training, median of rounds (least to most)")
    for head in ("setting", "example", "set-up", "way", "60 s", "120 s", "180 s", "last"):
        table.add_column(head)
    table.add_column("live ahead from")
    for setting, name, set_up in dict.fromkeys(
        (r["setting"], r["example"], r["set_up_s"]) for r in rows
    ):
        of_way: dict[str, list[list[int]]] = {way: [] for way in WAYS}
        for r in rows:
            if (r["setting"], r["example"], r["set_up_s"]) == (setting, name, set_up):
                of_way[r["way"]].append([int(count) for count in r["steps_at"].split()])
        for way, rounds in of_way.items():
            if rounds:
                counts = [_median(rounds, end // _EVERY_S - 1) for end in (60, 120, 180)]
                ahead = "" if way == "live" else _ahead_from(of_way["live"], rounds)
                table.add_row(
                    setting, name, f"{set_up} s", way, *counts, _median(rounds, -1), ahead
                )
    Console().print(table)


def _median(rounds: list[list[int]], place: int) -> str:
    try:
        counts = [each[place] for each in rounds]
    except IndexError:
        return "-"
    return f"{statistics.median(counts):.0f} ({min(counts)} to {max(counts)})"


def _ahead_from(live: list[list[int]], other: list[list[int]]) -> str:
    """The moment since when live tuning has made more steps, in the medians of the rounds."""
    if not live:
        return "-"
    medians: Callable[[list[list[int]]], list[float]] = lambda rounds: [  # noqa: E731
        statistics.median(counts) for counts in zip(*rounds, strict=False)
    ]
    pairs = [*zip(medians(live), medians(other), strict=False)]
    behind = [place for place, (own, theirs) in enumerate(pairs) if own < theirs]
    if not behind:
        return "the start"
    return "never" if behind[-1] == len(pairs) - 1 else f"{(behind[-1] + 2) * _EVERY_S} s"


def main() -> None:
    """Measure, or show a file."""
    parser = new_parser(__doc__)
    parser.add_argument("--examples", default="digits,vgg,lm,ncf", metavar="NAME,...")
    parser.add_argument(
        "--settings", type=rates_of, default="100mbit,300mbit,loopback", metavar="SETTING,..."
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--seconds", type=float, default=300.0, metavar="S", help="of each cell")
    parser.add_argument(
        "--set-up", type=float, default=0.0, metavar="S", help="set-up that the script makes first"
    )
    add_table(parser, "live_tuning.csv", "steps against time of one training")
    arguments = parse(parser, show, train)
    names = check_names(parser, "examples", arguments.examples, [*EXAMPLES])
    if any(arguments.settings.values()):
        need_hosts()
    output = open_table(parser, arguments, _COLUMNS, goes_on=True)
    measure(arguments, output, names)
    show(output)


if __name__ == "__main__":
    main()
