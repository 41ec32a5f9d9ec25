"""Does our dispatcher cost anything where it sends what Horovod's optimizer would send?

Three copies of each model train in one job: one under Horovod's own optimizer, one under ours with
its default plan, and, as a control, another under Horovod's. They take their steps in turns (in an
order that is drawn by lot), so that all see the same machine. Where a copy lies in memory makes its
steps some percent longer or shorter for as long as it lives, so each block of rounds has new
copies, made in an order that is drawn by lot. A block gives the median ratios of ours and of the
control to Horovod's; the table shows the medians of blocks with 95 % intervals from order
statistics. The aim is at most 1.00, never above 1.02. Peak memory comes from two more jobs that
train one copy each.

    python benchmarks/runtime_overhead.py --settings loopback --blocks 10
    python benchmarks/runtime_overhead.py --output runtime_overhead.csv
"""

from __future__ import annotations

import csv
import math
import os
import random
import resource
import statistics
import subprocess
import sys

from command_line import add_table, new_parser, open_table, own_part, parse
from median_interval import median_interval
from rich.console import Console
from rich.table import Table

from hvd_autosync.search_space.exchange_plan import ExchangePlan
from hvd_autosync.testing import Testbed, testbed_missing

_COLUMNS = ("setting", "model", "what", "block", "horovod", "ours", "control")
_CONTENDERS = {"horovod": None, "ours": ExchangePlan(), "control": None}
_WITH_MEMORY = ("horovod", "ours")
_MEMORY_STEPS = 10


def work(
    setting: str, model: str, blocks: int, rounds: int, warmup: int, output: str, only: str
) -> None:
    """A rank's part: blocks of rounds of steps, or the memory of one contender."""
    import horovod.torch as hvd
    import torch
    from exchanged.models import MODELS
    from exchanged.trainers import Trainer

    hvd.init()
    torch.set_num_threads(1)
    rows: list[tuple[object, ...]] = []
    if only:
        trainer = Trainer(only, MODELS[model], _CONTENDERS[only])
        for _ in range(_MEMORY_STEPS):
            trainer.step()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append((setting, model, f"memory of {only}", 0, peak, peak, peak))
    lots = random.Random(0)
    for block in range(0 if only else blocks):
        names = list(_CONTENDERS)
        lots.shuffle(names)
        trainers = {name: Trainer(name, MODELS[model], _CONTENDERS[name]) for name in names}
        for number in range(warmup + rounds):
            lots.shuffle(names)
            seconds = {name: trainers[name].step() for name in names}
            if number >= warmup:
                own = (seconds[name] for name in _CONTENDERS)
                rows.append((setting, model, "step_s", block, *own))
    if hvd.rank() == 0:
        with open(output, "a", newline="") as file:
            csv.writer(file).writerows(rows)


def _ratio(steps: list[dict[str, str]], name: str) -> str:
    """The median of the blocks' ratios to Horovod's, with its interval."""
    numbers = dict.fromkeys(r["block"] for r in steps)
    blocks = [[r for r in steps if r["block"] == number] for number in numbers]
    ratios = (
        statistics.median(float(r[name]) / float(r["horovod"]) for r in block) for block in blocks
    )
    return "{:.3f} ({:.3f} .. {:.3f})".format(*median_interval(ratios))


def _median(steps: list[dict[str, str]], name: str) -> float:
    return statistics.median(float(r[name]) for r in steps)


def show(output: str) -> None:
    """Print the table of a file of measurements."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    table = Table(title="our dispatcher against Horovod's optimizer", title_justify="left")
    for column in ("setting", "model"):
        table.add_column(column)
    columns = ("Horovod ms", "ours ms", "ours : Horovod", "control : Horovod")
    for column in (*columns, "Horovod MiB", "ours MiB"):
        table.add_column(column, justify="right")
    for setting, model in dict.fromkeys((r["setting"], r["model"]) for r in rows):
        own = [r for r in rows if (r["setting"], r["model"]) == (setting, model)]
        steps = [r for r in own if r["what"] == "step_s"]
        memory = {r["what"]: float(r["ours"]) for r in own if r["what"] != "step_s"}
        table.add_row(
            setting,
            model,
            *(f"{1e3 * _median(steps, name):.2f}" for name in ("horovod", "ours")),
            *(_ratio(steps, name) for name in ("ours", "control")),
            *(f"{memory.get(f'memory of {name}', math.nan):.0f}" for name in _WITH_MEMORY),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def run(
    setting: str, models: list[str], blocks: int, rounds: int, warmup: int, output: str
) -> None:
    """All jobs of one setting."""
    rate = None if setting == "loopback" else float(setting.removesuffix("mbit"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def launch(options: list[str], bed: Testbed | None) -> None:
        for model in models:
            for only in ("", *_WITH_MEMORY):
                part = own_part(
                    __file__,
                    setting=setting,
                    model=model,
                    blocks=blocks,
                    rounds=rounds,
                    warmup=warmup,
                    output=output,
                    only=only,
                )
                start = subprocess.run if bed is None else bed.run
                start(["horovodrun", *options, "--gloo", *part], env=environment, check=True)

    if rate is None:
        launch(["-np", "2"], None)
    elif missing := testbed_missing():
        print(f"{setting} is left out: {missing}")
    else:
        with Testbed(2, rate) as bed:
            launch(bed.horovodrun_options(), bed)


def main() -> None:
    """Runs the benchmark, or a rank's part of it."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add(
        "--settings",
        default="loopback,300mbit",
        metavar="S,...",
        help="loopback, or rates between two hosts (default: %(default)s)",
    )
    add("--models", default="ncf,vgg,resnet,bert", metavar="M,...", help="(default: %(default)s)")
    add("--blocks", type=int, default=40, help="each with new copies (default: %(default)s)")
    add("--rounds", type=int, default=60, help="of steps in each block (default: %(default)s)")
    add("--warmup", type=int, default=4, help="rounds that do not count (default: %(default)s)")
    add_table(parser, "runtime_overhead.csv", "every round")
    args = parse(parser, show, work)
    output = open_table(parser, args, _COLUMNS)
    for setting in args.settings.split(","):
        run(setting, args.models.split(","), args.blocks, args.rounds, args.warmup, output)
    show(output)


if __name__ == "__main__":
    main()
