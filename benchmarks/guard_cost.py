"""What does it cost to watch the loss of a training under a lossy strategy?

Trains models under a codec on two ranks of this host, and adds up what the guard takes inside of
their steps: adding losses, sending a window's sum, judging it, taking snapshots. The share is of
all the time that training took.

    python benchmarks/guard_cost.py
    python benchmarks/guard_cost.py --models vgg --steps 1000 --output guard_cost.csv
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any

from command_line import add_table, new_parser, open_table, own_part, parse
from rich.console import Console
from rich.table import Table

_COLUMNS = ("model", "step", "step_s", "guard_s")


def work(model: str, steps: int, output: str) -> None:
    """A rank's part."""
    import horovod.torch as hvd
    import torch
    from exchanged.models import MODELS
    from exchanged.trainers import Trainer

    from hvd_autosync.runtime import planned
    from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan

    hvd.init()
    torch.set_num_threads(1)
    coded = ClassPlan(codec="bf16")
    plan = ExchangePlan(2, embedding=coded, large=coded, rest=coded)
    trainer = Trainer(model, MODELS[model], plan)
    guard, spent = planned._guard, [0.0]

    def timed(optimizer: Any) -> None:
        begun = perf_counter()
        guard(optimizer)
        spent[0] += perf_counter() - begun

    planned._guard = timed
    rows = []
    for step in range(steps):
        before = spent[0]
        rows.append((model, step, trainer.step(), spent[0] - before))
    if trainer.optimizer._guard is None:  # type: ignore[attr-defined]
        sys.exit("the guard has ended the codec: this model cannot be used here")
    if hvd.rank() == 0:
        with open(output, "a", newline="") as file:
            csv.writer(file).writerows(rows)


def show(output: str) -> None:
    """Print the table of a file of measurements."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    table = Table(title="the guard's share of a training, two ranks on one host")
    for column in ("model", "steps", "step ms", "guard us/step", "median us", "most ms", "share"):
        table.add_column(column, justify="right")
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        steps, guard = ([float(row[name]) for row in own] for name in ("step_s", "guard_s"))
        table.add_row(
            model, str(len(own)), f"{1e3 * statistics.median(steps):.2f}",
            f"{1e6 * statistics.fmean(guard):.1f}", f"{1e6 * statistics.median(guard):.1f}",
            f"{1e3 * max(guard):.2f}", f"{sum(guard) / sum(steps):.2%}",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> None:
    """Runs the benchmark, or a rank's part of it."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--models", default="ncf,vgg,resnet,bert", metavar="M,...", help="(default: %(default)s)")
    add("--steps", type=int, default=600, help="of each model (default: %(default)s)")
    add_table(parser, "guard_cost.csv", "every step")
    args = parse(parser, show, work)
    output = open_table(parser, args, _COLUMNS)
    for model in args.models.split(","):
        script = own_part(__file__, model=model, steps=args.steps, output=output)
        subprocess.run(
            ["horovodrun", "-np", "2", "--gloo", *script], check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    show(output)


if __name__ == "__main__":
    main()
