"""Measures the link between the ranks, as a program of its own that runs on every rank.

It takes about two seconds: an allreduce is timed as a function of its bytes. Rank 0 reports to the
driver by :mod:`hvd_autosync.runtime.driver.wire`.
"""

from __future__ import annotations

import os
import socket
from time import perf_counter
from typing import NoReturn

import horovod.torch as hvd
import numpy as np
import torch

from hvd_autosync.runtime.driver.environment import spec_from_environment
from hvd_autosync.runtime.driver.sender import Sender
from hvd_autosync.runtime.trial.ending import leave, peak_memory_bytes
from hvd_autosync.search_space.resources import Link

#: Message sizes, bytes; each rank goes through them in this order, as far as is useful.
_SIZES = tuple(4096 * 4**power for power in range(7))
#: A message this large that takes this long tells the bandwidth; a small one may just have stalled.
_TELLING_BYTES, _TELLING_S = 1 << 18, 0.1
#: A message that takes this long is the last one, however small; two sizes are always measured.
_LONGEST_S = 0.5
#: For each size, so many repetitions as fit into the time, within these bounds.
_EACH_S, _LEAST, _MOST = 1.0, 6, 20
#: Stalls only ever add time, and on a busy network most large messages have one.
_QUANTILE = 0.1


def main() -> None:
    """Measure as a program of its own, whose trial stands in the environment."""
    spec = spec_from_environment()
    assert spec is not None, "a probe is a trial"
    measure(spec.key)


def measure(key: str) -> NoReturn:
    """Measure, report and end, on every rank.

    Args:
        key: The trial's.
    """
    hvd.init()
    sender = Sender(os.dup(2), key, hvd.rank())
    device = _device()
    hello = {"type": "hello", "host": socket.gethostname(), "device": device.type}
    sender.send(lambda: hello)
    link = measure_link(device)
    if hvd.rank() == 0:
        sender.send(lambda: {"type": "link", **vars(link)})
    end = {"type": "end", "cause": "probe", "peak_memory_bytes": peak_memory_bytes()}
    sender.send(lambda: end)
    leave()


def measure_link(device: torch.device) -> Link:
    """Time allreduces among all ranks; a collective.

    How far to go is agreed on, for all ranks must issue the same collectives. The messages are
    reduced one at a time, as :class:`Link` means it.

    Args:
        device: Where gradients live.
    """
    seconds: dict[int, float] = {}
    for size in _SIZES:
        buffer = torch.zeros(size // 4, device=device)
        # The first time a name is used it costs more: Horovod has not cached its response yet.
        first = _most(_reduce(buffer))
        count = min(max(int(_EACH_S / first), _LEAST), _MOST)
        samples = [_reduce(buffer) for _ in range(count)]
        seconds[size] = float(np.quantile(samples, _QUANTILE))
        enough_s = _TELLING_S if size >= _TELLING_BYTES else _LONGEST_S
        if len(seconds) > 1 and _most(seconds[size]) > enough_s:
            break
    return fit_link(hvd.size(), seconds)


def fit_link(ranks: int, seconds: dict[int, float]) -> Link:
    """The link that explains the smallest and the largest of the measured allreduces.

    The line through these two, not the best one through all: one size between them that a switch's
    buffer made faster, or a busy processor slower, would turn it by more than the two ends err. But
    what the second largest was reduced at is a rate that the link has: the largest may have met
    more of what only ever adds time.

    Args:
        ranks: How many ranks took part.
        seconds: Bytes -> seconds of an allreduce, for two sizes or more.
    """
    small, *_, second, large = [min(seconds), *sorted(seconds)]
    # Noise can make a large message faster than a small one, which no link does.
    extra_s = seconds[large] - seconds[small]
    bandwidth = (large - small) / extra_s if extra_s > 0 else large / seconds[large]
    bandwidth = max(bandwidth, second / seconds[second])
    return Link(ranks, max(seconds[small] - small / bandwidth, 0.0), bandwidth)


def _reduce(buffer: torch.Tensor) -> float:
    begin = perf_counter()
    hvd.allreduce_(buffer, name=f"hvd_autosync.probe.{buffer.numel()}", op=hvd.Sum)
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    return perf_counter() - begin


def _most(value: float) -> float:
    """The largest ``value`` of any rank; the same everywhere."""
    own = torch.tensor([value], dtype=torch.float64)
    return float(hvd.allreduce(own, name="hvd_autosync.probe.most", op=hvd.Max).item())


def _device() -> torch.device:
    """Where the gradients of a job on this host will most likely be."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", hvd.local_rank())
