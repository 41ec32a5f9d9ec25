"""What does it cost to watch the loss of a training under a lossy strategy?

Trains models under a codec on two ranks of this host, and adds up what the guard takes inside of
their steps: adding losses, sending a window's sum, judging it, taking snapshots. The share is of
all the time that a training took; the models are trained in turn, ``--repeats`` times each.

    python benchmarks/guard_cost.py
    python benchmarks/guard_cost.py --models vgg --steps 1000 --output guard_cost.csv
"""

from __future__ import annotations

import csv
import itertools
import os
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any

from command_line import add_table, new_parser, open_table, own_part, parse
from mean_interval import mean_interval
from rich.console import Console
from rich.table import Table

_COLUMNS = ("model", "repeat", "step", "step_s", "guard_s", "snapshot_bytes")


def work(model: str, repeat: int, steps: int, output: str) -> None:
    """A rank's part."""
    import horovod.torch as hvd
    import torch
    from exchanged.models import MODELS
    from exchanged.trainers import Trainer

    from hvd_autosync.runtime.guard.handler import LossGuardHandler
    from hvd_autosync.runtime.state.normalization import count_layers
    from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan

    hvd.init()
    torch.set_num_threads(1)
    coded = ClassPlan(codec="bf16")
    plan = ExchangePlan(2, embedding=coded, large=coded, rest=coded)
    count_layers()  # as where a training begins
    trainer = Trainer(model, MODELS[model], plan)
    stepped, spent = LossGuardHandler.stepped, [0.0]

    def timed(self: LossGuardHandler, *arguments: Any, **options: Any) -> None:
        begun = perf_counter()
        stepped(self, *arguments, **options)
        spent[0] += perf_counter() - begun

    LossGuardHandler.stepped = timed  # type: ignore[method-assign]
    rows = []
    for step in range(steps):
        before = spent[0]
        rows.append((model, repeat, step, trainer.step(), spent[0] - before))
    guard = trainer.optimizer._sync.guard.guard
    if guard is None:
        sys.exit("the guard has ended the codec: this model cannot be used here")
    taken = guard._snapshots.nbytes
    if hvd.rank() == 0:
        with open(output, "a", newline="") as file:
            csv.writer(file).writerows((*row, taken) for row in rows)


def show(output: str) -> None:
    """Print the table of a file of measurements."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    table = Table(title="the guard's share of a training, two ranks on one host")
    for column in (
        "model",
        "steps",
        "step ms",
        "guard us/step",
        "median us",
        "most ms",
        "share",
        "95 %",
        "snapshots MB",
    ):
        table.add_column(column, justify="right")
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        steps, guard = ([float(row[name]) for row in own] for name in ("step_s", "guard_s"))
        shares = [
            sum(float(row["guard_s"]) for row in own if row["repeat"] == repeat)
            / sum(float(row["step_s"]) for row in own if row["repeat"] == repeat)
            for repeat in dict.fromkeys(row["repeat"] for row in own)
        ]
        share, _, most = mean_interval(shares, 0.95)
        table.add_row(
            model,
            str(len(own)),
            f"{1e3 * statistics.median(steps):.2f}",
            f"{1e6 * statistics.fmean(guard):.1f}",
            f"{1e6 * statistics.median(guard):.1f}",
            f"{1e3 * max(guard):.2f}",
            f"{share:.2%}",
            f"+- {most - share:.2%}",
            f"{int(own[0]['snapshot_bytes']) / 1e6:.1f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> None:
    """Runs the benchmark, or a rank's part of it."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--models", default="ncf,vgg,resnet,bert", metavar="M,...", help="(default: %(default)s)")
    add("--steps", type=int, default=600, help="of each model (default: %(default)s)")
    add("--repeats", type=int, default=3, help="trainings of each model (default: %(default)s)")
    add_table(parser, "guard_cost.csv", "every step")
    args = parse(parser, show, work)
    output = open_table(parser, args, _COLUMNS)
    for repeat, model in itertools.product(range(args.repeats), args.models.split(",")):
        script = own_part(__file__, model=model, repeat=repeat, steps=args.steps, output=output)
        subprocess.run(
            ["horovodrun", "-np", "2", "--gloo", *script],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    show(output)


if __name__ == "__main__":
    main()
