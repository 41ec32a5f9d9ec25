"""Our codecs beside PyTorch's: bytes, error and time of one gradient.

Two ranks reduce the same gradient, a matrix of low rank and noise, again and again: exactly, under
each of our codecs, and under the communication hooks of PyTorch's ``DistributedDataParallel`` with
Gloo (``torch.distributed.algorithms.ddp_comm_hooks``). Bytes are counted at the loopback interface,
with all headers. The error is that of the sum over all steps, relative to the exact sum: what error
feedback owes at the end counts, what it has paid does not.

    horovodrun -np 2 --gloo python benchmarks/codec_comparison.py
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist
from exchanged.interface import sent_bytes
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hvd_autosync.runtime.optimizer.strategy_optimizer import make_strategy_optimizer
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.sync_plan import SyncPlan

#: One step of a contender: the gradient that it leaves.
Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Result:
    """One line of the table; times are medians over the steps."""

    codec: str
    by: str
    step_ms: float
    sent_mib: float
    share: float
    error: float


class Weight(torch.nn.Module):
    """A matrix whose gradient is whatever it is multiplied with."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, columns))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def ours(plan: ClassPlan, rows: int, columns: int, name: str) -> Step:
    """A step under one of our codecs."""
    model = Weight(rows, columns)
    arguments: dict[str, Any] = {
        "compression": hvd.Compression.none,
        "backward_passes_per_step": 1,
        "op": hvd.Average,
        "gradient_predivide_factor": 1.0,
    }
    optimizer: Any = make_strategy_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        model.named_parameters(prefix=name),
        SyncPlan(ExchangePlan(large=plan), {"large": ("*",)}),
        arguments,
    )

    def step(gradient: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        model(gradient).backward()
        optimizer.synchronize()
        assert model.weight.grad is not None
        return model.weight.grad

    return step


def torchs(hook: Any, state: Any, rows: int, columns: int) -> Step:
    """A step under one of PyTorch's hooks."""
    model = DistributedDataParallel(Weight(rows, columns))
    if hook is not None:
        model.register_comm_hook(state, hook)

    def step(gradient: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        model(gradient).backward()
        found: torch.Tensor | None = model.module.weight.grad
        assert found is not None
        return found

    return step


def contenders(rows: int, columns: int) -> Iterator[tuple[str, str, Step]]:
    """Codec, whose it is, and a step under it."""
    plans = {
        "none": ClassPlan(slices=1),
        "fp16": ClassPlan(codec="fp16"),
        "bf16": ClassPlan(codec="bf16"),
        "int8": ClassPlan(codec="int8"),
        "topk 1 %": ClassPlan(codec="topk", ratio=0.01),
        "powersgd 2": ClassPlan(codec="powersgd", rank=2),
    }
    for name, plan in plans.items():
        yield name, "ours", ours(plan, rows, columns, name)
    group = dist.group.WORLD
    low_rank = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    yield "none", "PyTorch", torchs(None, None, rows, columns)
    yield "fp16", "PyTorch", torchs(default_hooks.fp16_compress_hook, group, rows, columns)
    # Its bf16 and int8 hooks need GPUs; it has none for top-k.
    yield "powersgd 2", "PyTorch", torchs(powerSGD_hook.powerSGD_hook, low_rank, rows, columns)


def gradient_of(step: int, rows: int, columns: int) -> torch.Tensor:
    """This rank's gradient: a signal of rank 2 that all share, and noise of its own."""
    shared = torch.Generator().manual_seed(1)
    signal = torch.randn(rows, 2, generator=shared) @ torch.randn(2, columns, generator=shared)
    own = torch.Generator().manual_seed(1000 * hvd.rank() + step)
    return signal + 0.5 * torch.randn(rows, columns, generator=own)


def measure(codec: str, by: str, step: Step, steps: int, rows: int, columns: int) -> Result:
    """Run one contender."""
    size_bytes = 4 * rows * columns
    warm = 3
    for number in range(warm):
        step(gradient_of(number, rows, columns))
    seconds, sent = [], 0
    total, exact = torch.zeros(rows, columns), torch.zeros(rows, columns)
    for number in range(warm, warm + steps):
        gradient = gradient_of(number, rows, columns)
        exact += hvd.allreduce(gradient, name="exact")
        hvd.barrier()
        before, begin = sent_bytes("lo"), perf_counter()
        found = step(gradient)
        seconds.append(perf_counter() - begin)
        hvd.barrier()
        sent += sent_bytes("lo") - before
        total += found
    error = float((total - exact).norm() / exact.norm())
    each = sent / steps / hvd.size()
    return Result(
        codec, by, 1e3 * statistics.median(seconds), each / 2**20, each / size_bytes, error
    )


def show(results: list[Result]) -> None:
    """Print the table."""
    table = Table(title="codecs on one gradient, two ranks", title_justify="left")
    for column in ("codec", "by"):
        table.add_column(column)
    for column in ("step ms", "MiB sent", "of gradient", "error"):
        table.add_column(column, justify="right")
    for r in sorted(results, key=lambda each: each.codec):
        table.add_row(
            r.codec,
            r.by,
            f"{r.step_ms:.1f}",
            f"{r.sent_mib:.2f}",
            f"{r.share:.3f}",
            f"{r.error:.1e}",
        )
    Console(width=100).print(table)


def main() -> None:
    """Run on all ranks; rank 0 reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--columns", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, help="CSV file to write")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29541")
    dist.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size())
    results = [
        measure(codec, by, step, args.steps, args.rows, args.columns)
        for codec, by, step in contenders(args.rows, args.columns)
    ]
    dist.destroy_process_group()
    if hvd.rank() == 0:
        show(results)
        if args.output:
            with args.output.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(field.name for field in fields(Result))
                writer.writerows(map(astuple, results))


if __name__ == "__main__":
    main()
