"""What a step costs under our ``DistributedOptimizer`` in a trial, against Horovod's own.

One job of two ranks or more trains two copies of each model: one under Horovod's optimizer, one
under ours with everything measured that a trial measures. Their steps alternate in pairs (which
comes first is drawn by lot), so that both see the same machine. Each pair gives a ratio of elapsed
times; the table shows the median ratio with its 95 % interval from order statistics. The aim is at
most 1.01. The last column, the median difference of the training thread's processor time, tells the
cost even on a busy machine.

    horovodrun -np 2 --gloo python benchmarks/optimizer_overhead.py --output overhead.csv
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import horovod.torch as hvd
import torch

from hvd_autosync.runtime.install.hooks import install
from hvd_autosync.search_space import Strategy, TrialSpec

#: Name -> sizes of the layers.
MODELS = {
    "80 small tensors": [32] * 41,
    "20 medium tensors": [256] * 11,
    "4 large tensors": [1024, 1024, 1024],
}
ROWS = 16
#: Elapsed and processor seconds.
Seconds = tuple[float, float]
horovods = hvd.DistributedOptimizer
horovods_backward = torch.autograd.backward


@dataclass(frozen=True)
class Result:
    """One line of the table; times and ratios are medians."""

    model: str
    tensors: int
    mib: float
    pairs: int
    horovod_ms: float
    ours_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    extra_cpu_us: float


def start_measuring() -> None:
    """Take part as in a trial that never ends; what it would tell its driver goes nowhere."""
    error_output, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    install(TrialSpec("benchmark", Strategy(), warmup_steps=0, measured_steps=10**9))
    os.dup2(error_output, 2)
    os.close(error_output)
    os.close(nowhere)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Horovod's side runs torch's own ``backward``."""
    watched, torch.autograd.backward = torch.autograd.backward, horovods_backward
    try:
        yield
    finally:
        torch.autograd.backward = watched


def make_step(
    factory: Callable[..., torch.optim.Optimizer], sizes: list[int], name: str
) -> Callable[[], Seconds]:
    """A function that trains one step and times it."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model = torch.nn.Sequential(*layers)
    base = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = factory(base, named_parameters=model.named_parameters(prefix=name))
    x = torch.randn(ROWS, sizes[0])

    def step() -> Seconds:
        begin, cpu = time.perf_counter(), time.thread_time()
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        return time.perf_counter() - begin, time.thread_time() - cpu

    return step


def compare(model: str, pairs: int, warmup: int) -> Result:
    """Time one model; all ranks take the same course."""
    sizes = MODELS[model]
    theirs = make_step(horovods, sizes, f"horovods.{model}")
    ours = make_step(hvd.DistributedOptimizer, sizes, f"ours.{model}")
    lots = random.Random(0)
    seconds: list[tuple[Seconds, Seconds]] = []
    for _ in range(warmup + pairs):
        mine = ours() if lots.random() < 0.5 else None
        with unwatched():
            other = theirs()
        seconds.append((other, mine or ours()))
    seconds = seconds[warmup:]
    ratios = sorted(our[0] / their[0] for their, our in seconds)
    half = 0.98 * math.sqrt(pairs)  # 1.96 standard deviations of a binomial with p = 1/2
    return Result(
        model=model,
        tensors=2 * (len(sizes) - 1),
        mib=4 * sum(a * b + b for a, b in itertools.pairwise(sizes)) / 2**20,
        pairs=pairs,
        horovod_ms=1e3 * statistics.median(their[0] for their, _ in seconds),
        ours_ms=1e3 * statistics.median(our[0] for _, our in seconds),
        ratio=statistics.median(ratios),
        ratio_low=ratios[max(int(pairs / 2 - half), 0)],
        ratio_high=ratios[min(math.ceil(pairs / 2 + half), pairs - 1)],
        extra_cpu_us=1e6 * statistics.median(our[1] - their[1] for their, our in seconds),
    )


def show(results: list[Result]) -> None:
    """Print the table."""
    print(
        f"{'model':20} {'MiB':>6} {'Horovod ms':>11} {'ours ms':>9} {'ratio':>7}  "
        f"{'95 % interval':16}  {'extra us of CPU':>15}"
    )
    for r in results:
        print(
            f"{r.model:20} {r.mib:6.1f} {r.horovod_ms:11.3f} {r.ours_ms:9.3f} {r.ratio:7.4f}  "
            f"{r.ratio_low:.4f} .. {r.ratio_high:.4f}  {r.extra_cpu_us:15.1f}"
        )


def main() -> None:
    """Run the comparison on all ranks; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=600, help="pairs of steps per model")
    parser.add_argument("--warmup", type=int, default=50, help="pairs that are not counted")
    parser.add_argument("--output", type=Path, help="CSV file to write")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    start_measuring()
    results = [compare(model, args.pairs, args.warmup) for model in MODELS]
    if hvd.rank() == 0:
        show(results)
        if args.output:
            with args.output.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(field.name for field in fields(Result))
                writer.writerows(map(astuple, results))


if __name__ == "__main__":
    main()
