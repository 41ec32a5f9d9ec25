"""Does a long training under each strategy stay as large as it was?

Two ranks on this host train a small model with a table for thousands of steps, under one strategy
after the other, and after every pass rank 0 does what scripts do: it asks for a checkpoint. Every
so many steps each rank writes down what it holds: resident memory, memory that malloc() has given
out (all of the process, so that nothing is hidden by what is free again), blocks of Python's,
threads, descriptors, and what is queued: messages, and operations of Horovod's. Rank 1 is slow in
every fourth stretch of 1,000 steps, so that policies for stragglers have something to do.

    python benchmarks/soak.py
    python benchmarks/soak.py --steps 2000 --strategies "Horovod,fp16,ASP"
    python benchmarks/soak.py --controllers mpi --strategies "ASP,SSP(2)"
    python benchmarks/soak.py --show soak.csv

The first fifth is warm-up, as is the fifth after a switch of protocol in the middle. Of the rest,
slopes are medians of all pairs' (Theil and Sen), per 1,000 steps, of the rank and phase that grow
fastest, with their 95 % intervals. A quantity is flat where the
interval lies below its bound, grows where it lies above it, and is not known where it holds it.
Counts are flat where the median of the last third is not above that of the first. "Horovod" is the
peer, without a line of ours in the process; "a leak" is Horovod with 64 bytes lost per step, which
the program must notice. The exit status is 1 unless all are flat and the leak grows. A file that
exists already is gone on with. With two idle cores a strategy takes about a minute.
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from command_line import add_table, check_names, commit_now, new_parser, open_table, own_part, parse
from rich.console import Console
from rich.table import Table

_COLUMNS = (
    "commit",
    "controller",
    "strategy",
    "rank",
    "step",
    "seconds",
    "rss_bytes",
    "heap_bytes",
    "python_blocks",
    "threads",
    "descriptors",
    "queued",
    "in_force",
)
#: Quantity -> per 1,000 steps, what is flat; and in which unit the table has it.
_BOUNDS = {
    "rss_bytes": (64 * 1024, 1024),
    "heap_bytes": (16 * 1024, 1024),
    "python_blocks": (20, 1),
}
_COUNTS = ("threads", "descriptors", "queued")
_LEAK = "a leak"
_LEAKED_BYTES = 64
#: Shares of a training that are judged: what is warm by then, and each phase of those that switch
#: from one to another in the middle.
_ONE_PHASE, _TWO_PHASES = ((0.2, 1.0),), ((0.2, 0.5), (0.6, 1.0))
#: Samples that tell something.
_FEWEST = 9
_SWITCHING = (
    "post-local",
    "Sync-Switch",
    "ASP before BSP",
    "QSR + Sync-Switch",
    "PowerSGD + Sync-Switch",
)
_APPENDING = threading.Lock()
_CLASSES = {"embedding": ["table.weight"], "large": ["hidden.weight"]}
_BATCH, _BATCHES = 8, 250
#: What rank 1 sleeps in a step of a slow stretch, and how long stretches are.
_SLOW_S, _STRETCH = 0.002, 1000
_INT8 = {"embedding_codec": "int8", "large_codec": "int8", "rest_codec": "int8"}
_POWERSGD = {"large_codec": "powersgd", "large_rank": 2, "rest_codec": "int8"}
_TOPK = {
    "embedding_codec": "topk",
    "embedding_ratio": 0.05,
    "large_codec": "topk",
    "large_ratio": 0.05,
}


def strategies(steps: int) -> dict[str, dict[str, Any] | None]:
    """Name -> knobs, for trainings of so many steps; ``None``: by Horovod itself."""
    samples = 2 * steps * _BATCH
    return {
        "Horovod": None,
        _LEAK: None,
        "fp16": {f"{each}_codec": "fp16" for each in ("embedding", "large", "rest")},
        "bf16": {f"{each}_codec": "bf16" for each in ("embedding", "large", "rest")},
        "int8": _INT8,
        "top-k": _TOPK,
        "PowerSGD": _POWERSGD,
        "H = 4": {"local_steps": 4},
        "QSR": {"local_steps": 2, "local_power": 2, "local_alpha": 0.02},
        "post-local": {"local_steps": 8, "local_start": steps // 2},
        "ASP": {"protocol": "asp"},
        "SSP(2)": {"protocol": "ssp", "staleness": 2},
        "SSP(0)": {"protocol": "ssp", "staleness": 0},
        "Sync-Switch": {"protocol": "asp", "sync_share": 0.5, "total_samples": samples},
        "ASP before BSP": {
            "protocol": "asp",
            "sync_share": 0.5,
            "total_samples": samples,
            "async_first": True,
        },
        "greedy": {"stragglers": "greedy"},
        "elastic": {"stragglers": "elastic"},
        "balance": {"stragglers": "balance"},
        "int8 + H = 4": {**_INT8, "local_steps": 4},
        "PowerSGD + greedy": {**_POWERSGD, "stragglers": "greedy"},
        "top-k + elastic": {**_TOPK, "stragglers": "elastic"},
        "QSR + Sync-Switch": {
            "local_steps": 2,
            "local_power": 2,
            "local_alpha": 0.02,
            "protocol": "ssp",
            "sync_share": 0.5,
            "total_samples": samples,
        },
        "PowerSGD + Sync-Switch": {
            **_POWERSGD,
            "protocol": "asp",
            "sync_share": 0.5,
            "total_samples": samples,
        },
        "priority": {"order": "priority"},
        "sharded": {"embedding_exchange": "sharded", "large_exchange": "sharded"},
        "rows": {"embedding_exchange": "rows", "buckets": 3, "large_slices": 2},
    }


def work(controller: str, name: str, steps: int, every: int, commit: str, output: str) -> None:
    """A rank's part: one training, written down."""
    from soaked.held import Held

    if controller == "mpi":
        import mpi4py.MPI  # noqa: F401  # before hvd.init(), as messages over MPI need it
    import horovod.torch as hvd
    import torch
    from soaked.training import Data, Model, as_it_is
    from soaked.waiting import wait_asleep

    wait_asleep()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Model()
    base = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    knobs = strategies(steps)[name]
    optimizer: Any
    if knobs is None:
        optimizer = hvd.DistributedOptimizer(base, model.named_parameters())
    else:
        import hvd_autosync.torch

        used = {n: c for n, c in _CLASSES.items() if any(k.startswith(f"{n}_") for k in knobs)}
        optimizer = hvd_autosync.torch.DistributedOptimizer(
            base, model.named_parameters(), strategy=knobs, classes=used
        )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 / (1 + 10 * step / steps)
    )
    loader = torch.utils.data.DataLoader(
        Data(_BATCHES * _BATCH, hvd.rank()), _BATCH, shuffle=True, collate_fn=as_it_is
    )
    lost: list[bytes] = []
    held, step, began = Held(), 0, perf_counter()
    with open(f"{output}.{hvd.rank()}", "w", buffering=1, newline="") as file:
        rows = csv.writer(file)
        for _ in range(steps // _BATCHES):
            for batch in loader:
                optimizer.zero_grad()
                model.loss(batch).backward()
                if hvd.rank() == 1 and step // _STRETCH % 4 == 3:
                    sleep(_SLOW_S)
                optimizer.step()
                schedule.step()
                step += 1
                if name == _LEAK:
                    lost.append(bytes(_LEAKED_BYTES))
                if step % every == 0:
                    in_force = not getattr(optimizer, "_exact", False)
                    rows.writerow(
                        (
                            commit,
                            controller,
                            name,
                            hvd.rank(),
                            step,
                            perf_counter() - began,
                            *held.now(),
                            int(in_force),
                        )
                    )
            if hvd.rank() == 0:
                optimizer.state_dict()


Row = dict[str, Any]


def slope(steps: list[float], values: list[float]) -> tuple[float, float, float]:
    """The median of the slopes of all pairs of samples, and its 95 % interval, per 1,000 steps."""
    from scipy.stats import theilslopes

    middle, _, low, high = theilslopes([1000 * v for v in values], steps, 0.95)
    return float(middle), float(low), float(high)


def judge(samples: list[Row]) -> tuple[dict[str, tuple[float, float, float]], dict[str, str]]:
    """Slopes by quantity, and what each quantity does, of one rank's samples after its warm-up."""
    steps = [float(row["step"]) for row in samples]
    slopes = {each: slope(steps, [float(row[each]) for row in samples]) for each in _BOUNDS}
    does = {}
    for each, (bound, _) in _BOUNDS.items():
        _, low, high = slopes[each]
        does[each] = "flat" if high < bound else "grows" if low > bound else "not known"
    third = len(samples) // 3
    for each in _COUNTS:
        first, last = (
            statistics.median(float(row[each]) for row in part)
            for part in (samples[:third], samples[-third:])
        )
        does[each] = "flat" if last <= first else "grows"
    return slopes, does


def show(output: str) -> bool:
    """Print the table of a file of measurements; whether everything is as it has to be."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    table = Table(title="what two ranks hold, after the first fifth", title_justify="left")
    for column in (
        "controller",
        "strategy",
        "steps",
        "ms per step",
        "MiB",
        "resident KiB",
        "malloc KiB",
        "Python's blocks",
        "threads",
        "descriptors",
        "queued",
        "verdict",
    ):
        table.add_column(column, justify="left" if column in ("strategy", "verdict") else "right")
    well = True
    for controller, name in dict.fromkeys((row["controller"], row["strategy"]) for row in rows):
        own = [row for row in rows if (row["controller"], row["strategy"]) == (controller, name)]
        most = max(int(row["step"]) for row in own)
        ranks = sorted({row["rank"] for row in own})
        by_rank = [[row for row in own if row["rank"] == rank] for rank in ranks]
        stretches = [
            stretch
            for samples in by_rank
            for phase in (_TWO_PHASES if name in _SWITCHING else _ONE_PHASE)
            if len(stretch := _within(samples, *phase)) >= _FEWEST
        ]
        judged = [judge(samples) for samples in stretches]
        slopes = {
            each: max((slopes[each] for slopes, _ in judged), key=lambda of: of[2])
            for each in _BOUNDS
        }
        wrong = sorted(
            {
                f"{each.partition('_')[0]} {what}"
                for _, does in judged
                for each, what in does.items()
                if what != "flat"
            }
        )
        if not all(int(row["in_force"]) for row in own):
            wrong.append("the guard ended it")
        well &= ("python grows" in wrong) if name == _LEAK else not wrong
        table.add_row(
            controller,
            name,
            f"{most}",
            f"{1e3 * max(float(row['seconds']) for row in own) / most:.1f}",
            f"{max(int(row['rss_bytes']) for row in own) / 2**20:.0f}",
            *(_interval(slopes[each], unit) for each, (_, unit) in _BOUNDS.items()),
            *(_range(stretches, each) for each in _COUNTS),
            "; ".join(wrong) or "flat",
        )
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    bounds = ", ".join(f"{b / unit:g} {each}" for each, (b, unit) in _BOUNDS.items())
    console.print(f"slopes per 1,000 steps (95 % interval); flat is below {bounds} (KiB)")
    return well


def _within(samples: list[Row], begin: float, end: float) -> list[Row]:
    """Samples of a share of a rank's own steps: without a barrier ranks make unequally many."""
    most = max(int(row["step"]) for row in samples)
    return [row for row in samples if begin * most < int(row["step"]) <= end * most]


def _interval(of: tuple[float, float, float], unit: float) -> str:
    middle, low, high = (each / unit + 0.0 for each in of)
    return f"{middle:.1f} ({low:.1f} .. {high:.1f})"


def _range(stretches: list[list[Row]], column: str) -> str:
    values = [int(row[column]) for samples in stretches for row in samples]
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} .. {max(values)}"


def _soaked(output: str) -> set[tuple[str, str]]:
    """Controller and strategy of the trainings in a file."""
    with open(output) as file:
        return {(row["controller"], row["strategy"]) for row in csv.DictReader(file)}


def _soak(controller: str, name: str, steps: int, every: int, commit: str, output: str) -> str:
    """Train under one strategy, and append what was written down; what went wrong, if anything."""
    part = f"{output}.{controller}.{name}"
    script = own_part(
        __file__,
        controller=controller,
        name=name,
        steps=steps,
        every=every,
        commit=commit,
        output=part,
    )
    # Background threads that look for work less often leave the machine to those that have some.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "10"}
    command = ["horovodrun", "-np", "2", f"--{controller}", *script]
    done = subprocess.run(command, env=environment)
    if done.returncode:
        return f"{name} over {controller} ended with status {done.returncode}"
    parts = [Path(f"{part}.{rank}") for rank in range(2)]
    with _APPENDING, open(output, "a") as file:
        file.write("".join(part.read_text() for part in parts))
    for each in parts:
        each.unlink()
    print(f"{controller}: {name} done", flush=True)
    return ""


def main() -> None:
    """Runs the benchmark, or a rank's part of it."""
    parser = new_parser(__doc__)
    names = list(strategies(1))
    add = parser.add_argument
    add("--controllers", default="gloo", metavar="C,...", help="gloo, mpi (default: %(default)s)")
    add("--strategies", default=",".join(names), metavar="S,...", help="(default: %(default)s)")
    add("--steps", type=int, default=20_000, help="of each (default: %(default)s)")
    add(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="strategies that train beside each other (default: %(default)s)",
    )
    add("--every", type=int, default=250, help="steps between samples (default: %(default)s)")
    add_table(parser, "soak.csv", "every sample")
    args = parse(parser, lambda file: sys.exit(not show(file)), work)
    asked = check_names(parser, "strategies", args.strategies, names)
    output = open_table(parser, args, _COLUMNS, goes_on=True)
    known, commit = _soaked(output), commit_now()
    wanted = [
        (controller, name)
        for controller in args.controllers.split(",")
        for name in asked
        if (controller, name) not in known
    ]
    with ThreadPoolExecutor(args.at_once) as pool:
        jobs = [
            pool.submit(_soak, *cell, args.steps, args.every, commit, output) for cell in wanted
        ]
    failures = [each for job in jobs if (each := job.result())]
    if failures:
        sys.exit("\n".join(failures))
    sys.exit(not show(output))


if __name__ == "__main__":
    main()
