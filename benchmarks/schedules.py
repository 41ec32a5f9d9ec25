"""What do local steps and missing barriers cost in quality, and what do they save?

Two ranks on each of two hosts, which this machine imitates (``hvd_autosync.testing.Testbed``; needs
root), train two models on real data from start to end under each schedule, several times with
other seeds: a convolutional network with batch normalization on handwritten digits, and a
transformer on text. The time is that of training, without evaluations; the bytes are those that
leave a host's interface, headers included. With ``--slow 2`` the last rank computes so many times
as long as it needs.

    python benchmarks/schedules.py --seeds 1 --jobs "digits,digits*3"
    python benchmarks/schedules.py --output schedules.csv
    python benchmarks/schedules.py --show schedules.csv

A schedule is as good as the parallel baseline where the intervals of their last qualities overlap;
"time to baseline" is that until a pass after which the quality is within one standard deviation
of the baseline's last. A file that exists already is gone on with: what is in it is not trained
again. Leave the machine alone meanwhile: about 8 minutes per job and seed.
"""

from __future__ import annotations

import csv
import math
import os
import re
import statistics
import sys
from functools import partial
from time import perf_counter, sleep
from typing import Any

from command_line import add_table, check_names, need_hosts, new_parser, open_table, own_part, parse
from rich.console import Console
from rich.table import Table

from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.testing import Testbed

_HOSTS, _SLOTS = 2, 2
_COLUMNS = (
    "job",
    "schedule",
    "seed",
    "pass",
    "passes",
    "quality",
    "train_s",
    "sent_bytes",
    "averages",
)
_BASELINE = "parallel"


def schedules(steps: int, peak: float, samples: int) -> dict[str, Schedule | Protocol | None]:
    """Name -> schedule or protocol, for a training of so many steps with this peak learning rate.

    The powers' coefficients let rounds begin to grow right after the peak; those of "QSR from 2"
    lie between the published ones for SGD (0.25 times the peak) and for AdamW (2.2 times it).

    Args:
        steps: Of each rank.
        peak: The highest learning rate.
        samples: Of all ranks together.
    """
    shares = (5, 12.5, 25, 50)
    switches = {
        f"switch at {share:g} %": Protocol("asp", share=share / 100, total=samples)
        for share in shares
    }
    switches |= {
        f"ASP before BSP {share:g} %": Protocol(
            "asp", share=share / 100, async_first=True, total=samples
        )
        for share in shares
    }
    return {
        _BASELINE: None,
        "H = 2": Schedule(2),
        "QSR from 2": Schedule(2, 2, 1.0 * peak),
        "H = 4": Schedule(4),
        "H = 8": Schedule(8),
        "post-local 8": Schedule(8, start=steps // 2),
        "p = 1": Schedule(4, 1, 4.0 * peak),
        "p = 2 (QSR)": Schedule(4, 2, 2.0 * peak),
        "p = 3": Schedule(4, 3, 1.6 * peak),
        "ASP": Protocol("asp"),
        "SSP(2)": Protocol("ssp", 2),
        **switches,
    }


def work(job: str, label: str, names: list[str], seed: int, output: str, slow: float) -> None:
    """A rank's part: one training under each schedule, written down by rank 0."""
    import horovod.torch as hvd
    import torch
    from exchanged.interface import sent_bytes
    from scheduled.jobs import JOBS, rate_factor

    from hvd_autosync.runtime.optimizer.strategy_optimizer import make_strategy_optimizer
    from hvd_autosync.search_space.sync_plan import SyncPlan

    hvd.init()
    torch.set_num_threads(1)
    for name in names:
        kind, _, times = job.partition("*")
        own = JOBS[kind](seed)
        passes = own.passes * int(times or 1)
        steps = passes * len(own.loader)
        peak = max(group["lr"] for group in own.optimizer.param_groups)
        samples = steps * (own.loader.batch_size or 1) * hvd.size()
        chosen = schedules(steps, peak, samples)[name]
        named = [(f"{name}.{each}", p) for each, p in own.model.named_parameters()]
        optimizer: Any
        if chosen is None:
            optimizer = hvd.DistributedOptimizer(own.optimizer, named)
        else:
            arguments: dict[str, Any] = {
                "compression": hvd.Compression.none,
                "backward_passes_per_step": 1,
                "op": hvd.Average,
                "gradient_predivide_factor": 1.0,
            }
            schedule = chosen if isinstance(chosen, Schedule) else None
            protocol = chosen if isinstance(chosen, Protocol) else None
            optimizer = make_strategy_optimizer(
                own.optimizer, named, SyncPlan(schedule=schedule, protocol=protocol), arguments
            )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_factor, steps=steps))
        spent, sent, averages = 0.0, 0, 0
        for number in range(passes):
            own.begin_pass(number)
            hvd.barrier()
            begun, before = perf_counter(), sent_bytes()
            for batch in own.loader:
                began = perf_counter()
                optimizer.zero_grad()
                own.loss(batch).backward()
                if slow > 1 and hvd.rank() == hvd.size() - 1:
                    sleep((slow - 1) * (perf_counter() - began))
                optimizer.step()
                scheduler.step()
            spent, sent = spent + perf_counter() - begun, sent + sent_bytes() - before
            method = getattr(getattr(optimizer, "_sync", None), "method", None)
            averages = getattr(method, "averages", steps)
            quality = own.quality()
            most = hvd.allreduce(torch.tensor([spent, float(sent)]), op=hvd.Max, name="most")
            if hvd.rank() == 0:
                row = (label, name, seed, number + 1, passes, quality, *most.tolist(), averages)
                with open(output, "a", newline="") as file:
                    csv.writer(file).writerow(row)


Row = dict[str, Any]


def trainings(rows: list[Row], job: str, name: str) -> list[list[Row]]:
    """The passes of each training that came to its end, in order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if (row["job"], row["schedule"]) == (job, name):
            found.setdefault(row["seed"], []).append(row)
    return [each for each in found.values() if each[-1]["pass"] == each[-1]["passes"]]


def show(output: str) -> None:
    """Print the tables of a file of measurements."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    console = Console(width=None if sys.stdout.isatty() else 130)
    for job in dict.fromkeys(row["job"] for row in rows):
        if trainings(rows, job, _BASELINE):  # else there is nothing to compare with yet
            console.print(_table(rows, job))


def _table(rows: list[Row], job: str) -> Table:
    table = Table(title=f"{job}: last quality, means of the seeds", title_justify="left")
    table.add_column("schedule")
    for column in (
        "seeds",
        "quality",
        "against parallel",
        "MiB",
        "of parallel",
        "train s",
        "speedup",
        "s to baseline",
        "speedup to it",
    ):
        table.add_column(column, justify="right")
    baseline = trainings(rows, job, _BASELINE)
    finals = [float(each[-1]["quality"]) for each in baseline]
    goal = statistics.fmean(finals) - (statistics.stdev(finals) if len(finals) > 1 else 0.0)
    base = {each[-1]["seed"]: each for each in baseline}
    for name in dict.fromkeys(row["schedule"] for row in rows if row["job"] == job):
        own = trainings(rows, job, name)
        last = [each[-1] for each in own]
        pairs = [(each, base[each[-1]["seed"]]) for each in own if each[-1]["seed"] in base]
        quality = [float(each["quality"]) for each in last]
        apart = [float(a[-1]["quality"]) - float(b[-1]["quality"]) for a, b in pairs]
        bytes_ = [float(a[-1]["sent_bytes"]) / float(b[-1]["sent_bytes"]) for a, b in pairs]
        faster = [float(b[-1]["train_s"]) / float(a[-1]["train_s"]) for a, b in pairs]
        reached = [_reached(each, goal) for each in own]
        sooner = [
            _reached(b, goal) / at if math.isfinite(at := _reached(a, goal)) else math.inf
            for a, b in pairs
            if math.isfinite(_reached(b, goal))
        ]
        table.add_row(
            name,
            str(len(own)),
            _mean(quality, 4),
            _mean(apart, 4),
            f"{statistics.fmean(float(each['sent_bytes']) for each in last) / 2**20:.1f}",
            f"{statistics.fmean(bytes_):.1%}",
            _median([float(e["train_s"]) for e in last]),
            _median(faster, 2),
            _median(reached),
            _median(sooner, 2),
        )
    return table


def _reached(training: list[Row], goal: float) -> float:
    """Seconds of training until the quality was there; infinite if it never was."""
    return next((float(r["train_s"]) for r in training if float(r["quality"]) >= goal), math.inf)


def _mean(values: list[float], digits: int) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def _median(values: list[float], digits: int = 1) -> str:
    finite = [value for value in values if math.isfinite(value)]
    never = f" ({len(values) - len(finite)} never)" if len(finite) < len(values) else ""
    return f"{statistics.median(finite):.{digits}f}{never}" if finite else "never"


def _trained(output: str, label: str, seed: int) -> set[str]:
    """The schedules under which this training is in the file; drops those that were broken off."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    own = [row for row in rows if (row["job"], row["seed"]) == (label, str(seed))]
    whole = {row["schedule"] for row in own if row["pass"] == row["passes"]}
    with open(output, "w", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS)
        writer.writeheader()
        writer.writerows(r for r in rows if r not in own or r["schedule"] in whole)
    return whole


def main() -> None:
    """Runs the benchmark, or a rank's part of it."""
    parser = new_parser(__doc__)
    names = list(schedules(100, 0.1, 100))
    add = parser.add_argument
    add(
        "--jobs",
        default="digits,text",
        metavar="J,...",
        help="digits, text, or digits*3 for three times as many passes (default: %(default)s)",
    )
    add("--schedules", default=",".join(names), metavar="S,...", help="(default: %(default)s)")
    add("--seeds", type=int, default=5, help="(default: %(default)s)")
    add("--slow", type=float, default=1.0, metavar="TIMES", help="(default: %(default)s)")
    add("--rate", type=float, default=100.0, metavar="MBIT", help="(default: %(default)s)")
    add_table(parser, "schedules.csv", "every pass")
    args = parse(parser, show, work)
    need_hosts()
    for job in args.jobs.split(","):
        if not re.fullmatch(r"(digits|text)(\*[1-9]\d*)?", job):
            parser.error(f"{job!r} is not a job; one is, for example, digits*3")
    asked = check_names(parser, "schedules", args.schedules, names)
    output = open_table(parser, args, _COLUMNS, goes_on=True)
    for job in args.jobs.split(","):
        for seed in range(args.seeds):
            label = f"{job}, {args.rate:g} Mbit/s"
            label += f", a rank {args.slow:g} times as slow" if args.slow > 1 else ""
            known = _trained(output, label, seed)
            wanted = [name for name in asked if name not in known]
            if not wanted:
                continue
            print(f"{label}: seed {seed + 1} of {args.seeds}: {', '.join(wanted)}", flush=True)
            script = own_part(
                __file__,
                job=job,
                label=label,
                names=wanted,
                seed=seed,
                output=output,
                slow=args.slow,
            )
            with Testbed(_HOSTS, args.rate) as bed:
                command = ["horovodrun", *bed.horovodrun_options(_SLOTS), "--gloo", *script]
                done = bed.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
            if done.returncode:
                sys.exit(f"{job} with seed {seed} ended with status {done.returncode}")
    show(output)


if __name__ == "__main__":
    main()
