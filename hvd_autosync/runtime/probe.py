"""Measures the link between the ranks: seconds of an allreduce as a function of its bytes."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np
import torch
from horovod.torch.mpi_ops import Sum, allreduce, allreduce_

from hvd_autosync.search_space.resources import Link

_KIB = 1024
#: Message sizes; each rank goes through them in this order.
_SIZES = (4 * _KIB, 32 * _KIB, 256 * _KIB, 1024 * _KIB, 8192 * _KIB)
_MOST_ROUNDS = 10
_BUDGET_S = 0.5


def measure_link(device: torch.device) -> Link:
    """Measure with all ranks together, in about half a second.

    How far to go is agreed on after each step, for all ranks must issue the same collectives. The
    messages are reduced one at a time, as :class:`Link` means it. On a slow link the large
    messages are left out.

    Args:
        device: Where gradients live.
    """
    begin = perf_counter()
    buffers: dict[int, torch.Tensor] = {}
    for size in _SIZES:
        # The first time a name is used it costs more: Horovod has not cached its response yet.
        buffers[size] = torch.zeros(size // 4, device=device)
        spent = _reduce(buffers[size])
        if len(buffers) > 1 and _anyone(perf_counter() - begin + 16 * spent > _BUDGET_S):
            break
    seconds: dict[int, list[float]] = {size: [] for size in buffers}
    for _ in range(_MOST_ROUNDS):
        for size, buffer in buffers.items():
            seconds[size].append(_reduce(buffer))
        if _anyone(perf_counter() - begin > _BUDGET_S):
            break
    return fit_link({size: median(samples) for size, samples in seconds.items()})


def fit_link(seconds: dict[int, float]) -> Link:
    """The link that fits measured allreduces, by least squares of relative errors.

    Relative, because an absolute error that is nothing in a large message would drown the
    latency.

    Args:
        seconds: Bytes -> seconds of an allreduce, for two sizes or more.
    """
    sizes = np.array(list(seconds), dtype=np.float64)
    times = np.array(list(seconds.values()), dtype=np.float64)
    rows = np.stack([1 / times, sizes / times], axis=1)
    latency, per_byte = np.linalg.lstsq(rows, np.ones_like(times), rcond=None)[0]
    # Noise can make either of them negative, which no link is.
    latency = min(max(float(latency), 0.0), float(times.min()))
    slowest = float(times.max() / sizes.max())
    return Link(latency, 1 / (float(per_byte) if per_byte > 0 else slowest))


def _reduce(buffer: torch.Tensor) -> float:
    begin = perf_counter()
    allreduce_(buffer, name=f"hvd_autosync.probe.{buffer.numel()}", op=Sum)
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    return perf_counter() - begin


def _anyone(flag: bool) -> bool:
    """Whether ``flag`` holds on any rank; the same answer everywhere.

    A sum, because Horovod has no other reduction while a rank is in ``join()``.
    """
    votes = allreduce(torch.tensor([float(flag)]), name="hvd_autosync.probe.votes", op=Sum)
    return bool(votes.item() > 0)
