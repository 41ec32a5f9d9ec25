"""Test each strategy for leaks of memory, threads and descriptors during a long training.

Two ranks on this host train a small model with an embedding table for thousands of steps, under one
strategy after the other. After every epoch rank 0 requests a checkpoint, as scripts do. At regular
intervals each rank records its resident memory, the memory allocated by malloc() in the whole
process (without freed memory, which could hide a leak), Python's memory blocks, threads,
descriptors, and queued messages and Horovod operations. Rank 1 is slow in every fourth interval of
1,000 steps, so that straggler policies act.

    python benchmarks/soak.py
    python benchmarks/soak.py --steps 2000 --strategies "Horovod,fp16,ASP"
    python benchmarks/soak.py --controllers mpi --strategies "ASP,SSP(2)"
    python benchmarks/soak.py --show soak.csv

The first fifth of a training is warm-up, and so is the tenth after a switch in the middle. The
slopes of the rest are Theil-Sen slopes (the median over all pairs of samples) per 1,000 steps, with
95 % intervals, of the rank and phase with the largest upper bound. A quantity is "flat" if the
interval lies below its bound, "grows" if it lies above, and is "unknown" if it contains the bound.
A count is flat if the median of its last third is not above that of its first third. "Horovod" is
the baseline, without hvd_autosync in the process; "a leak" is the positive control: Horovod with 64
bytes lost per step. The exit status is 1 unless all strategies are flat and the control grows. If
the output file exists, its trainings are not repeated. With two idle cores a strategy takes about a
minute.
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
#: Quantity -> bound per 1,000 steps below which it is flat, and the table's unit.
_BOUNDS = {
    "rss_bytes": (64 * 1024, 1024),
    "heap_bytes": (16 * 1024, 1024),
    "python_blocks": (20, 1),
}
_COUNTS = ("threads", "descriptors", "queued")
_LEAK = "a leak"
_LEAKED_BYTES = 64
#: Shares of a training that are tested, without warm-up: of a training with one phase, and of one
#: that switches in the middle.
_ONE_PHASE, _TWO_PHASES = ((0.2, 1.0),), ((0.2, 0.5), (0.6, 1.0))
#: Least number of samples for a test.
_FEWEST = 9
_SWITCHING = (
    "post-local",
    "Sync-Switch",
    "ASP before BSP",
    "QSR + Sync-Switch",
    "PowerSGD + Sync-Switch",
)
_APPENDING = threading.Lock()
_CLASSES = {"embedding": ("table.weight",), "large": ("hidden.weight",)}
_BATCH, _BATCHES = 8, 250
#: Sleep of rank 1 in each step of a slow interval, and the steps of an interval.
_SLOW_S, _INTERVAL = 0.002, 1000
_INT8 = {"embedding_codec": "int8", "large_codec": "int8", "rest_codec": "int8"}
_POWERSGD = {"large_codec": "powersgd", "large_rank": 2, "rest_codec": "int8"}
_TOPK = {
    "embedding_codec": "topk",
    "embedding_ratio": 0.05,
    "large_codec": "topk",
    "large_ratio": 0.05,
}


def strategies(steps: int) -> dict[str, dict[str, Any] | None]:
    """Return name -> knobs for trainings of ``steps`` steps; ``None``: Horovod's own optimizer."""
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
    """Run one training on a rank, and write its samples to a file."""
    from soaked.held import Held

    if controller == "mpi":
        import mpi4py.MPI  # noqa: F401  # before hvd.init(), as messages over MPI require
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
                if hvd.rank() == 1 and step // _INTERVAL % 4 == 3:
                    sleep(_SLOW_S)
                optimizer.step()
                schedule.step()
                step += 1
                if name == _LEAK:
                    lost.append(bytes(_LEAKED_BYTES))
                if step % every == 0:
                    in_force = not (hasattr(optimizer, "_sync") and optimizer._sync.exact)
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
    """Return the Theil-Sen slope and its 95 % interval, per 1,000 steps."""
    from scipy.stats import theilslopes

    middle, _, low, high = theilslopes([1000 * v for v in values], steps, 0.95)
    return float(middle), float(low), float(high)


def judge(samples: list[Row]) -> tuple[dict[str, tuple[float, float, float]], dict[str, str]]:
    """Return the slope and the verdict of each quantity, from one rank's samples of one phase."""
    steps = [float(row["step"]) for row in samples]
    slopes = {each: slope(steps, [float(row[each]) for row in samples]) for each in _BOUNDS}
    verdicts = {}
    for each, (bound, _) in _BOUNDS.items():
        _, low, high = slopes[each]
        verdicts[each] = "flat" if high < bound else "grows" if low > bound else "unknown"
    third = len(samples) // 3
    for each in _COUNTS:
        first, last = (
            statistics.median(float(row[each]) for row in part)
            for part in (samples[:third], samples[-third:])
        )
        verdicts[each] = "flat" if last <= first else "grows"
    return slopes, verdicts


def show(output: str) -> bool:
    """Print the table of a file of samples; return whether the test has passed."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    table = Table(title="resources of two ranks after the warm-up", title_justify="left")
    for column in (
        "controller",
        "strategy",
        "steps",
        "ms per step",
        "MiB",
        "resident KiB",
        "malloc KiB",
        "Python blocks",
        "threads",
        "descriptors",
        "queued",
        "verdict",
    ):
        table.add_column(column, justify="left" if column in ("strategy", "verdict") else "right")
    passed = True
    for controller, name in dict.fromkeys((row["controller"], row["strategy"]) for row in rows):
        own = [row for row in rows if (row["controller"], row["strategy"]) == (controller, name)]
        most = max(int(row["step"]) for row in own)
        ranks = sorted({row["rank"] for row in own})
        by_rank = [[row for row in own if row["rank"] == rank] for rank in ranks]
        phases = [
            phase_samples
            for samples in by_rank
            for phase in (_TWO_PHASES if name in _SWITCHING else _ONE_PHASE)
            if len(phase_samples := _within(samples, *phase)) >= _FEWEST
        ]
        if not phases:
            sys.exit(
                f"{name}: fewer than {_FEWEST} samples after the warm-up; "
                "choose more --steps or a smaller --every"
            )
        judged = [judge(samples) for samples in phases]
        slopes = {
            each: max((slopes[each] for slopes, _ in judged), key=lambda of: of[2])
            for each in _BOUNDS
        }
        wrong = sorted(
            {
                f"{each.partition('_')[0]} {what}"
                for _, verdicts in judged
                for each, what in verdicts.items()
                if what != "flat"
            }
        )
        if not all(int(row["in_force"]) for row in own):
            wrong.append("fallback of the loss guard")
        passed &= ("python grows" in wrong) if name == _LEAK else not wrong
        table.add_row(
            controller,
            name,
            f"{most}",
            f"{1e3 * max(float(row['seconds']) for row in own) / most:.1f}",
            f"{max(int(row['rss_bytes']) for row in own) / 2**20:.0f}",
            *(_interval(slopes[each], unit) for each, (_, unit) in _BOUNDS.items()),
            *(_range(phases, each) for each in _COUNTS),
            "; ".join(wrong) or "flat",
        )
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    bounds = ", ".join(f"{b / unit:g} {each}" for each, (b, unit) in _BOUNDS.items())
    console.print(f"slopes per 1,000 steps (95 % interval); flat is below {bounds} (KiB)")
    return passed


def _within(samples: list[Row], begin: float, end: float) -> list[Row]:
    """Return the samples in a share of a rank's own steps, whose number differs without barrier."""
    most = max(int(row["step"]) for row in samples)
    return [row for row in samples if begin * most < int(row["step"]) <= end * most]


def _interval(of: tuple[float, float, float], unit: float) -> str:
    middle, low, high = (each / unit + 0.0 for each in of)
    return f"{middle:.1f} ({low:.1f} .. {high:.1f})"


def _range(phases: list[list[Row]], column: str) -> str:
    values = [int(row[column]) for samples in phases for row in samples]
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} .. {max(values)}"


def _recorded_trainings(output: str) -> set[tuple[str, str]]:
    """Return controller and strategy of the trainings in a file."""
    with open(output) as file:
        return {(row["controller"], row["strategy"]) for row in csv.DictReader(file)}


def _train(controller: str, name: str, steps: int, every: int, commit: str, output: str) -> str:
    """Train under one strategy and append the samples to the table; return an error or ""."""
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
    # A longer cycle of Horovod's background loop leaves more processor time to the trainings.
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
    """Run the benchmark, or a rank's part of it."""
    parser = new_parser(__doc__)
    names = list(strategies(1))
    add = parser.add_argument
    add(
        "--controllers",
        default="gloo",
        metavar="C,...",
        help="controllers: gloo, mpi (default: %(default)s)",
    )
    add(
        "--strategies",
        default=",".join(names),
        metavar="S,...",
        help="strategies (default: %(default)s)",
    )
    add("--steps", type=int, default=20_000, help="steps of each training (default: %(default)s)")
    add(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="number of trainings that run at the same time (default: %(default)s)",
    )
    add("--every", type=int, default=250, help="steps between samples (default: %(default)s)")
    add_table(parser, "soak.csv", "every sample")
    args = parse(parser, lambda file: sys.exit(not show(file)), work)
    asked = check_names(parser, "strategies", args.strategies, names)
    output = open_table(parser, args, _COLUMNS, goes_on=True)
    known, commit = _recorded_trainings(output), commit_now()
    wanted = [
        (controller, name)
        for controller in args.controllers.split(",")
        for name in asked
        if (controller, name) not in known
    ]
    with ThreadPoolExecutor(args.at_once) as pool:
        jobs = [
            pool.submit(_train, *cell, args.steps, args.every, commit, output) for cell in wanted
        ]
    failures = [each for job in jobs if (each := job.result())]
    if failures:
        sys.exit("\n".join(failures))
    sys.exit(not show(output))


if __name__ == "__main__":
    main()
