"""What does a slow rank cost under each remedy, in time and in accuracy?

Four ranks on this host train a convolutional network on handwritten digits from start to end. The
last of them computes 1.5, 2 or 4 times as long as it needs, always or in the second quarter of the
training only. Remedies: none (BSP), ``greedy`` (no barrier as long as it is slow), ``elastic``
(the others go on without it until the end of their pass), ``balance`` (smaller batches for it,
larger ones for the others), and ASP all the time. In each step ranks also wait for an accelerator
that this machine does not have, 2 ms per sample: four networks on two processors wait for
each other rather than for the slow one.

    python benchmarks/stragglers.py --factors 2 --seeds 1
    python benchmarks/stragglers.py --output stragglers.csv
    python benchmarks/stragglers.py --show stragglers.csv

Samples per second are those that all ranks trained on; under elastic the slow one skips some. The
delay is the number of steps from the first slow one to the alarm. ``straggler_alarms.py`` has
delays and false alarms by a simulation of many more steps. A file that exists already is gone on
with: what is in it is not trained again. Leave the machine alone meanwhile: a minute per training.
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
from time import perf_counter, sleep
from typing import Any

from command_line import add_table, check_names, new_parser, open_table, own_part, parse
from rich.console import Console
from rich.table import Table

from hvd_autosync.search_space.protocol import Protocol

_RANKS = 4
#: What an accelerator takes for a sample.
_SAMPLE_S = 0.002
_COLUMNS = ("remedy", "slow", "factor", "seed", "accuracy", "train_s", "samples", "noticed_after")
_REMEDIES = {
    "BSP": Protocol(share=1.0),
    "greedy": Protocol(share=1.0, stragglers="greedy"),
    "elastic": Protocol(share=1.0, stragglers="elastic"),
    "balance": Protocol(share=1.0, stragglers="balance"),
    "ASP": Protocol("asp"),
}


def work(remedy: str, slow: str, factor: float, seed: int, output: str) -> None:
    """A rank's part: one training, written down by rank 0."""
    import horovod.torch as hvd
    import torch
    from scheduled.jobs import JOBS, rate_factor

    from hvd_autosync.runtime.optimizer.strategy_optimizer import make_strategy_optimizer
    from hvd_autosync.search_space.sync_plan import SyncPlan

    hvd.init()
    torch.set_num_threads(1)
    arguments: dict[str, Any] = {
        "compression": hvd.Compression.none,
        "backward_passes_per_step": 1,
        "op": hvd.Average,
        "gradient_predivide_factor": 1.0,
    }
    own = JOBS["digits"](seed)
    named = [(f"{remedy}.{each}", p) for each, p in own.model.named_parameters()]
    optimizer: Any = make_strategy_optimizer(
        own.optimizer, named, SyncPlan(protocol=_REMEDIES[remedy]), arguments
    )
    steps = own.passes * len(own.loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, steps))
    first, last = (0, steps) if slow == "always" else (steps // 4, steps // 2)
    spent, samples, noticed = 0.0, 0, None
    for number in range(own.passes):
        own.begin_pass(number)
        hvd.barrier()
        begun, step = perf_counter(), number * len(own.loader)
        for batch in own.loader:
            began = perf_counter()
            optimizer.zero_grad()
            own.loss(batch).backward()
            sleep(_SAMPLE_S * len(batch[0]))
            if hvd.rank() == _RANKS - 1 and first <= step < last:
                sleep((factor - 1) * (perf_counter() - began))
            optimizer.step()
            scheduler.step()
            step, samples = step + 1, samples + len(batch[0])
            if noticed is None and optimizer._sync.method.straggler_noticed:
                noticed = step - first  # negative: a false alarm
        spent += perf_counter() - begun
        quality = own.quality()
    total = hvd.allreduce(torch.tensor([float(samples)]), op=hvd.Sum, name="samples").item()
    most = hvd.allreduce(torch.tensor([spent]), op=hvd.Max, name="most").item()
    if hvd.rank() == 0:
        delay = "" if noticed is None else noticed
        row = (remedy, slow, factor, seed, quality, most, total, delay)
        with open(output, "a", newline="") as file:
            csv.writer(file).writerow(row)


def _trained(output: str) -> set[tuple[str, str, float, int]]:
    """Remedy, slowness, factor and seed of the trainings in a file."""
    with open(output) as file:
        return {
            (row["remedy"], row["slow"], float(row["factor"]), int(row["seed"]))
            for row in csv.DictReader(file)
        }


def _launch(script: list[str]) -> None:
    command = ["horovodrun", "-np", str(_RANKS), "--gloo", *script]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(f"the job ended with status {done.returncode}")


def show(output: str) -> None:
    """Print the table of a file of measurements."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    table = Table(title="one of four ranks is slow", title_justify="left")
    for column in (
        "slow",
        "times",
        "remedy",
        "seeds",
        "accuracy",
        "train s",
        "as fast as BSP",
        "samples per s",
        "alarm after steps",
    ):
        table.add_column(column, justify="right")
    for slow, factor, remedy in dict.fromkeys((r["slow"], r["factor"], r["remedy"]) for r in rows):
        own = [r for r in rows if (r["slow"], r["factor"], r["remedy"]) == (slow, factor, remedy)]
        base = {
            r["seed"]: float(r["train_s"])
            for r in rows
            if (r["slow"], r["factor"], r["remedy"]) == (slow, factor, "BSP")
        }
        ratios = [base[r["seed"]] / float(r["train_s"]) for r in own if r["seed"] in base]
        accuracy = [float(r["accuracy"]) for r in own]
        spread = f" ± {statistics.stdev(accuracy):.3f}" if len(accuracy) > 1 else ""
        noticed = [int(r["noticed_after"]) for r in own if r["noticed_after"]]
        rates = [float(r["samples"]) / float(r["train_s"]) for r in own]
        table.add_row(
            slow,
            factor,
            remedy,
            str(len(own)),
            f"{statistics.fmean(accuracy):.3f}{spread}",
            f"{statistics.median(float(r['train_s']) for r in own):.0f}",
            f"{statistics.median(ratios):.2f}" if ratios else "",
            f"{statistics.median(rates):.0f}",
            f"{statistics.median(noticed):.0f}" if noticed else "",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> None:
    """Runs the benchmark, or a rank's part of it."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add(
        "--factors",
        default="1,1.5,2,4",
        metavar="F,...",
        help="times that the slow rank computes (default: %(default)s)",
    )
    add("--slow", default="always,sometimes", metavar="S,...", help="(default: %(default)s)")
    add("--remedies", default=",".join(_REMEDIES), metavar="R,...", help="(default: %(default)s)")
    add("--seeds", type=int, default=3, help="(default: %(default)s)")
    add_table(parser, "stragglers.csv", "every training")
    args = parse(parser, show, work)
    remedies = check_names(parser, "remedies", args.remedies, list(_REMEDIES))
    output = open_table(parser, args, _COLUMNS, goes_on=True)
    known = _trained(output)
    for seed in range(args.seeds):
        for factor in map(float, args.factors.split(",")):
            for slow in args.slow.split(",") if factor > 1 else ["always"]:
                print(f"seed {seed + 1} of {args.seeds}: {slow} {factor:g} times", flush=True)
                for remedy in remedies:
                    if (remedy, slow, factor, seed) not in known:
                        _launch(
                            own_part(
                                __file__,
                                remedy=remedy,
                                slow=slow,
                                factor=factor,
                                seed=seed,
                                output=output,
                            )
                        )
    show(output)


if __name__ == "__main__":
    main()
