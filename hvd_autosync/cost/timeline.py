"""The end of a step's communication, or a round's: a simulation of Horovod's background loop.

The loop checks for ready tensors once per cycle, negotiates and fuses them, and does nothing else
until they are reduced (``BackgroundThreadLoop`` and ``RunLoopOnce`` in
``horovod/common/operations.cc``). So ready tensors are processed in batches: a batch that begins at
S ends at S plus its work, and the next begins with the next cycle after that, or after the next
arrival.

Shapes: ``c`` strategies, ``k`` items (tensors or buckets) in the order of their arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Loop:
    """Horovod's background loop under some strategies.

    Attributes:
        cycle_s: Cycle time, seconds, shape ``(c,)``.
        fusion_bytes: Size of the fusion buffer, shape ``(c,)``; 0: no fusion.
        response_s: Seconds of one operation without its bytes, shape ``(c,)``.
    """

    cycle_s: FloatArray
    fusion_bytes: FloatArray
    response_s: FloatArray


@dataclass(frozen=True)
class Items:
    """The items on the wire, as arrays of shape ``(k, c)``; the simulation loops over ``k``.

    Attributes:
        arrival_s: When it is ready, seconds from the start of backward; nondecreasing along ``k``.
        size_bytes: Its bytes in the fusion buffer; 0: there is no such item.
        wire_s: Seconds of its bytes on the wire.
        operations: Number of its consecutive operations.
        alone: Number of responses of its own, beside the one that it may share; 0: it may be fused;
            -1: it needs no response.
        latency: Latency of its operations, times that of one among all ranks.
    """

    arrival_s: FloatArray
    size_bytes: FloatArray
    wire_s: FloatArray
    operations: FloatArray
    alone: FloatArray
    latency: FloatArray


def communication(
    loop: Loop, items: Items, backward_s: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the end of the last item and the time of all work before the end of backward.

    Args:
        loop: The background loop.
        items: The items.
        backward_s: The end of backward, seconds from its start, shape ``(c,)``.

    Returns:
        Two arrays of shape ``(c,)``, in seconds, the first from the start of backward. Waiting is
        no work.
    """
    count = len(loop.cycle_s)
    begin = np.full(count, -np.inf)  # of the batch that is being filled
    work, fused, end, later, overlapped = (np.zeros(count) for _ in range(5))
    columns = (getattr(items, field.name) for field in fields(Items))
    for ready, size, wire, operations, alone, latency in zip(*columns, strict=True):
        there = size > 0
        response_s = loop.response_s * latency
        joins = there & (ready <= begin)
        opens = there & ~joins
        overlapped = overlapped + np.where(opens, _before(backward_s, begin, work), 0.0)
        # The batch before is finished first, and this item waits for the next cycle.
        end = np.where(opens, np.maximum(end, begin + work), end)
        begin = np.where(opens, _found(loop, ready, begin, end), begin)
        fits = joins & (fused + size <= loop.fusion_bytes) & (alone == 0)
        # Nothing is fused with an item that is sent alone.
        first = np.where(alone > 0, np.inf, size)
        fused = np.where(there, np.where(fits, fused + size, first), fused)
        own = wire + np.where(fits, 0.0, (1 + alone) * response_s)
        work = np.where(opens, own, np.where(joins, work + own, work))
        # A consecutive operation is found a whole cycle after the one before began.
        each = response_s + wire / operations
        follow = (operations - 1) * np.maximum(loop.cycle_s - each, response_s)
        later = np.where(there, np.maximum(later, follow), later)
    overlapped = overlapped + _before(backward_s, begin, work)
    return np.maximum(end, begin + work) + later, overlapped


def round_s(
    loop: Loop,
    average_s: FloatArray,
    forward_s: FloatArray,
    backward_s: FloatArray,
    steps: FloatArray,
) -> FloatArray:
    """Return the seconds from one average of parameters to the next, shape ``(c,)``.

    In the first backward after an average ranks agree on the length of the round, and in its last
    on its end: each is an operation without bytes, which the end of its step waits for
    (``runtime/sync/local_steps.py``). So with short steps a round takes three cycles.

    Args:
        loop: The background loop.
        average_s: Seconds of the average itself, as of :func:`communication`.
        forward_s: Seconds of forward of one step.
        backward_s: Seconds of backward of one step.
        steps: Steps of the round, at least 2.
    """
    step_s = forward_s + backward_s
    begin, end, now = np.zeros_like(average_s), average_s, average_s
    for before in (np.zeros_like(steps), steps - 2):
        backward = now + before * step_s + forward_s
        begin = _found(loop, backward, begin, end)
        end = begin + loop.response_s
        now = np.maximum(backward + backward_s, end)
    return _found(loop, now, begin, end)


def _found(loop: Loop, ready: FloatArray, begin: FloatArray, end: FloatArray) -> FloatArray:
    """Return when the loop finds what is ready then, if its last batch began and ended then."""
    next_cycle = np.maximum(begin + loop.cycle_s, end)
    # An arrival at an idle loop falls anywhere into a cycle: half a cycle on average.
    start: FloatArray = np.where(ready > next_cycle, ready + loop.cycle_s / 2, next_cycle)
    return start


def _before(backward_s: FloatArray, begin: FloatArray, work: FloatArray) -> FloatArray:
    """Return the seconds of a batch's work before the end of backward."""
    seconds: FloatArray = np.clip(backward_s - begin, 0.0, work)
    return seconds
