"""What a step costs in a trial of the default: Horovod's optimizer with all that a trial measures.

One job trains several copies of each model, one after the other, for a block of rounds each. In
each round a copy makes three steps, in an order that is drawn by lot: one as in a trial, one
without anything of ours, and, as a control, another one without. So all three are of the same
tensors: where a copy lies in memory changes its time by some percent, for as long as it lives. A
block gives the ratios of the mean times of the measured and the control steps to those of the
others, trimmed as in trials; the table shows the medians of blocks with 95 % intervals from order
statistics. The aim is at most 1.01. The last columns are the median differences of the training
thread's processor time, of which waits are a part: Horovod's look all the time. A single rank waits
for nobody, so there they are the cost of our own events.

    horovodrun -np 2 --gloo python benchmarks/optimizer_overhead.py --output overhead.csv
    horovodrun -np 1 --gloo python benchmarks/optimizer_overhead.py
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from median_interval import median_interval

from hvd_autosync.runtime.install.hooks import install
from hvd_autosync.search_space import StepTime, Strategy, TrialSpec

#: Name -> sizes of the layers.
MODELS = {
    "80 small tensors": [32] * 41,
    "20 medium tensors": [256] * 11,
    "4 large tensors": [1024, 1024, 1024],
}
ROWS = 16
#: Elapsed and processor seconds.
Seconds = tuple[float, float]
#: The kinds of steps; the first and the last are alike.
CONTENDERS = ("horovod", "ours", "control")
horovods_backward = torch.autograd.backward


@dataclass(frozen=True)
class Result:
    """One block of one model; times are trimmed means of its rounds, processor times medians."""

    model: str
    block: int
    rounds: int
    horovod_s: float
    ours_s: float
    control_s: float
    ours_extra_cpu_s: float
    control_extra_cpu_s: float


def start_measuring() -> None:
    """Take part as in a trial that never ends; what it would tell its driver goes nowhere."""
    error_output, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    install(TrialSpec("benchmark", Strategy(), warmup_steps=0, measured_steps=10**9))
    os.dup2(error_output, 2)
    os.close(error_output)
    os.close(nowhere)


@contextlib.contextmanager
def unwatched(optimizer: Any) -> Iterator[None]:
    """Let a step be Horovod's and torch's own."""
    cls = type(optimizer)
    watched = cls.step, cls.synchronize, torch.autograd.backward
    cls.step, cls.synchronize = cls._horovod_step, cls._horovod_synchronize
    torch.autograd.backward = horovods_backward
    try:
        yield
    finally:
        cls.step, cls.synchronize, torch.autograd.backward = watched


def make_step(sizes: list[int], name: str) -> tuple[Any, Callable[[], Seconds]]:
    """An optimizer, and a function that trains one step with it and times that."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model = torch.nn.Sequential(*layers)
    base = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(base, named_parameters=model.named_parameters(prefix=name))
    x = torch.randn(ROWS, sizes[0])

    def step() -> Seconds:
        begin, cpu = time.perf_counter(), time.thread_time()
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        return time.perf_counter() - begin, time.thread_time() - cpu

    return optimizer, step


def compare(model: str, blocks: int, rounds: int, warmup: int) -> list[Result]:
    """Time one model; all ranks take the same course."""
    lots = random.Random(0)
    results: list[Result] = []
    for block in range(blocks):
        optimizer, step = make_step(MODELS[model], model)
        order = list(CONTENDERS)
        seconds: dict[str, list[Seconds]] = {name: [] for name in CONTENDERS}
        for _ in range(warmup + rounds):
            lots.shuffle(order)
            for name in order:
                with contextlib.nullcontext() if name == "ours" else unwatched(optimizer):
                    seconds[name].append(step())
        theirs, ours, control = (seconds[name][warmup:] for name in CONTENDERS)
        results.append(
            Result(
                model,
                block,
                rounds,
                *(
                    StepTime.from_steps([s for s, _ in each]).mean_s
                    for each in (theirs, ours, control)
                ),
                *(
                    statistics.median(c - t for (_, t), (_, c) in zip(theirs, each, strict=True))
                    for each in (ours, control)
                ),
            )
        )
    return results


def show(results: list[Result]) -> None:
    """Print the table."""
    if hvd.size() == 1:
        print("one rank, which exchanges nothing: the cost of our own events")
    print(
        f"{'model':18} {'Horovod ms':>10} {'ours ms':>8}  {'ours : Horovod':24}  "
        f"{'control : Horovod':24}  {'extra us of CPU':>15} {'control':>8}"
    )
    for model in dict.fromkeys(r.model for r in results):
        own = [r for r in results if r.model == model]
        theirs = statistics.median(r.horovod_s for r in own)
        ours = statistics.median(r.ours_s for r in own)
        ratios = (
            "{:.3f} ({:.3f} .. {:.3f})".format(*median_interval(each))
            for each in (
                [r.ours_s / r.horovod_s for r in own],
                [r.control_s / r.horovod_s for r in own],
            )
        )
        extra = statistics.median(r.ours_extra_cpu_s for r in own)
        control = statistics.median(r.control_extra_cpu_s for r in own)
        columns = "  ".join(f"{each:24}" for each in ratios)
        print(
            f"{model:18} {1e3 * theirs:10.3f} {1e3 * ours:8.3f}  {columns}  "
            f"{1e6 * extra:15.0f} {1e6 * control:8.0f}"
        )


def main() -> None:
    """Run the comparison on all ranks; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--blocks", type=int, default=30, help="each with new copies (default: %(default)s)")
    add("--rounds", type=int, default=40, help="of steps in each block (default: %(default)s)")
    add("--warmup", type=int, default=10, help="rounds that do not count (default: %(default)s)")
    add("--output", type=Path, help="CSV file to write")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    start_measuring()
    results = [
        result
        for model in MODELS
        for result in compare(model, args.blocks, args.rounds, args.warmup)
    ]
    if hvd.rank() == 0:
        show(results)
        if args.output:
            with args.output.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(field.name for field in fields(Result))
                writer.writerows(map(astuple, results))


if __name__ == "__main__":
    main()
