"""Measures the link between the ranks, in a program of its own that runs on every rank.

It takes about two seconds: it times an allreduce as a function of its bytes. Rank 0 reports the
link to the driver by :mod:`hvd_autosync.runtime.driver.wire`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from time import perf_counter
from typing import NoReturn

import numpy as np
import torch

from hvd_autosync.runtime.collectives.operations import (
    Max,
    ProcessSet,
    Sum,
    all_ranks,
    allreduce_async_,
    init,
    local_rank,
    rank,
    size,
    synchronize,
)
from hvd_autosync.runtime.driver.environment import spec_from_environment
from hvd_autosync.runtime.driver.sender import Sender
from hvd_autosync.runtime.trial.ending import leave, peak_memory_bytes
from hvd_autosync.search_space.resources import Link

#: Message sizes, bytes, in order; larger ones are skipped once they tell nothing more.
_SIZES = tuple(4096 * 4**power for power in range(7))
#: A message of this many bytes that takes this many seconds determines the bandwidth; a smaller one
#: may just have stalled.
_TELLING_BYTES, _TELLING_S = 1 << 18, 0.1
#: A message that takes this many seconds is the last one, whatever its size; two sizes are always
#: measured.
_LONGEST_S = 0.5
#: Time for the repetitions of each size, seconds, and their smallest and largest number.
_EACH_S, _LEAST, _MOST = 1.0, 6, 20
#: The quantile that is used: stalls only add time, and on a busy network most large messages have
#: one.
_QUANTILE = 0.1


def main() -> None:
    """Measure as a program of its own; the environment has the trial."""
    spec = spec_from_environment()
    assert spec is not None, "a probe is a trial"
    measure(spec.key)


def measure(key: str) -> NoReturn:
    """Measure, report and end, on every rank.

    Args:
        key: The trial's key.
    """
    init()
    sender = Sender(os.dup(2), key, rank())
    device = _device()
    hello = {"type": "hello", "host": socket.gethostname(), "device": device.type}
    sender.send(lambda: hello)
    link = measure_link(device, all_ranks())
    if rank() == 0:
        sender.send(lambda: {"type": "link", **vars(link)})
    end = {"type": "end", "cause": "probe", "peak_memory_bytes": peak_memory_bytes()}
    sender.send(lambda: end)
    leave()


def probe_in_place(hosts: Sequence[tuple[str, int]], device: torch.device) -> Link | None:
    """Measure the link between all ranks of a running job, between two steps; a collective.

    No link of a part of the ranks is measured. It needs process sets, which would stay in the job,
    and each delays every later operation. And all ranks must make equally many operations: Horovod
    names the script's unnamed ones by their number, and would wait for one of another number.

    Args:
        hosts: Names of the hosts that take part, and how many of their ranks.
        device: The device of the gradients; the script's current device stays what it is.

    Returns:
        The link; ``None`` where these are not all ranks of the job.
    """
    if sum(slots for _, slots in hosts) < size():
        return None
    return measure_link(device, all_ranks())


def measure_link(device: torch.device, group: ProcessSet) -> Link:
    """Time allreduces among ranks; a collective.

    Ranks agree on where to stop, because all must issue the same collectives. The messages are
    reduced one at a time, as :class:`Link` defines it.

    Args:
        device: The device of the gradients.
        group: Process set of the ranks.
    """
    seconds: dict[int, float] = {}
    for count_bytes in _SIZES:
        # The script may have another default type.
        buffer = torch.zeros(count_bytes // 4, dtype=torch.float32, device=device)
        # The first use of a name takes longer: Horovod has not cached its response yet.
        first = _most(_reduce(buffer, group), group)
        count = min(max(int(_EACH_S / first), _LEAST), _MOST)
        samples = [_reduce(buffer, group) for _ in range(count)]
        seconds[count_bytes] = float(np.quantile(samples, _QUANTILE))
        enough_s = _TELLING_S if count_bytes >= _TELLING_BYTES else _LONGEST_S
        if len(seconds) > 1 and _most(seconds[count_bytes], group) > enough_s:
            break
    return fit_link(group.size(), seconds)


def fit_link(ranks: int, seconds: dict[int, float]) -> Link:
    """Return the link that explains the smallest and the largest of the measured allreduces.

    It is the line through these two, not the best fit of all: one size between them that a switch's
    buffer made faster, or a busy processor slower, would turn a fit by more than the errors of the
    two ends. But the bandwidth is at least the rate at which the second largest was reduced: the
    largest may have been delayed more.

    Args:
        ranks: How many ranks took part.
        seconds: Bytes -> seconds of an allreduce, for two sizes or more.
    """
    small, *_, second, large = [min(seconds), *sorted(seconds)]
    # Noise can make a large message faster than a small one, which is impossible for a link.
    extra_s = seconds[large] - seconds[small]
    bandwidth = (large - small) / extra_s if extra_s > 0 else large / seconds[large]
    bandwidth = max(bandwidth, second / seconds[second])
    return Link(ranks, max(seconds[small] - small / bandwidth, 0.0), bandwidth)


def _reduce(buffer: torch.Tensor, group: ProcessSet) -> float:
    begin = perf_counter()
    name = f"hvd_autosync.probe.{buffer.numel()}"
    synchronize(allreduce_async_(buffer, name=name, op=Sum, process_set=group))
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    return perf_counter() - begin


def _most(value: float, group: ProcessSet) -> float:
    """Return the largest ``value`` of any rank of the group, on every one."""
    own = torch.tensor([value], dtype=torch.float64, device="cpu")
    name = "hvd_autosync.probe.most"
    synchronize(allreduce_async_(own, name=name, op=Max, process_set=group))
    return float(own.item())


def _device() -> torch.device:
    """Return the most likely device of a job's gradients on this host."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A launcher may have left each rank one device, or ranks may share one.
    number = local_rank() % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return torch.device("cuda", number)
