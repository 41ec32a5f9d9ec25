"""When the communication of a step ends: Horovod's loop over what is ready, for many strategies.

Horovod looks for ready tensors once per cycle, negotiates and fuses what it finds, and does nothing
else until that is reduced (``BackgroundThreadLoop`` and ``RunLoopOnce`` in
``horovod/common/operations.cc``). So what is ready is served in batches: one that begins at S ends
at S plus its work, and the next begins at the next cycle after that, or after the next arrival.

Shapes: ``c`` strategies, ``k`` items (tensors or buckets) in the order of their arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Loop:
    """What strategies make of Horovod's loop.

    Attributes:
        cycle_s: Pause between two looks, seconds, shape ``(c,)``.
        fusion_bytes: Most bytes that are fused, shape ``(c,)``; 0 fuses nothing.
        response_s: Seconds of one operation without its bytes, shape ``(c,)``.
    """

    cycle_s: FloatArray
    fusion_bytes: FloatArray
    response_s: FloatArray


@dataclass(frozen=True)
class Items:
    """What travels, as arrays of shape ``(k, c)``: a simulation goes item by item.

    Attributes:
        arrival_s: When it is ready, seconds from the start of backward; not falling along ``k``.
        size_bytes: Its bytes as fusion counts them; 0: there is no such item.
        wire_s: Seconds of its bytes on the wire.
        operations: Operations that follow each other for it.
        alone: Responses that it needs for itself, beside that which it may share; 0: it is fused;
            -1: it needs none.
    """

    arrival_s: FloatArray
    size_bytes: FloatArray
    wire_s: FloatArray
    operations: FloatArray
    alone: FloatArray


def communication(loop: Loop, items: Items) -> tuple[FloatArray, FloatArray]:
    """When the last item is through, and for how long something travels, each of shape ``(c,)``.

    Both in seconds, the first from the start of backward.
    """
    count = len(loop.cycle_s)
    begin = np.full(count, -np.inf)  # of the batch that is being filled
    work, fused, end, later, busy = (np.zeros(count) for _ in range(5))
    each_item = zip(
        items.arrival_s, items.size_bytes, items.wire_s, items.operations, items.alone, strict=True
    )
    for ready, size, wire, operations, alone in each_item:
        there = size > 0
        joins = there & (ready <= begin)
        opens = there & ~joins
        # The batch before is served, and this item waits for the look after it.
        end = np.where(opens, np.maximum(end, begin + work), end)
        look = np.maximum(begin + loop.cycle_s, end)
        # An arrival that finds the loop idle falls anywhere into a cycle.
        start = np.where(ready > look, ready + loop.cycle_s / 2, look)
        begin = np.where(opens, start, begin)
        fits = joins & (fused + size <= loop.fusion_bytes) & (alone == 0)
        # Nothing joins what is sent alone.
        first = np.where(alone > 0, np.inf, size)
        fused = np.where(there, np.where(fits, fused + size, first), fused)
        own = wire + np.where(fits, 0.0, (1 + alone) * loop.response_s)
        work = np.where(opens, own, np.where(joins, work + own, work))
        busy = busy + np.where(there, own, 0.0)
        # An operation that follows another is seen a whole cycle after that was begun.
        each = loop.response_s + wire / operations
        follow = (operations - 1) * np.maximum(loop.cycle_s - each, loop.response_s)
        later = np.where(there, np.maximum(later, follow), later)
    return np.maximum(end, begin + work) + later, busy
