"""Prepared steps: everything that the time of a step needs except the coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hvd_autosync.cost.coefficients import COORDINATION_SHARE, CYCLE_BUSY_S, REST_S, Coefficients
from hvd_autosync.cost.timeline import FloatArray, Items, Loop, communication, round_s

#: Indices of strategies.
Places = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Prepared:
    """Steps under ``c`` strategies, up to the coefficients.

    Attributes:
        items: Items on the wire; ``None`` if there are none.
        loop: Horovod's background loop.
        host_s: Seconds of work on gradients in memory, shape ``(c,)``.
        after_s: Seconds on the wire of what owners send when they have stepped, by one operation
            that follows all others, shape ``(c,)``; 0: nothing is owned.
        local: Steps of a round of local steps, shape ``(c,)``; 1: gradients are sent in every step.
        deferrable: Share of the communication that may be deferred into the next forward, shape
            ``(c,)``. It is 0 if updates are not deferred, and falls with the fused share: fused
            tensors finish together, so they leave nothing to overlap.
        contention: Seconds that a second of communication overlapped with computation adds to it.
        forward_s: Seconds of forward of one step.
        backward_s: Seconds of backward of one step.
        cycle_s: Cycle time of Horovod's background loop, shape ``(c,)``, even if that loop does not
            carry ``items``.
        latency_s: Seconds of an operation without its bytes, with a cached response.
    """

    items: Items | None
    loop: Loop
    host_s: FloatArray
    after_s: FloatArray
    local: FloatArray
    deferrable: FloatArray
    contention: float
    forward_s: float
    backward_s: float
    cycle_s: FloatArray
    latency_s: float

    def seconds(self, coefficients: Sequence[Coefficients]) -> FloatArray:
        """Return the seconds of a step, ``(b, c)`` for ``b`` sets of coefficients."""
        forward_s, backward_s, exposed_s = self._parts(coefficients)
        host, rest = (
            np.exp([[getattr(each, name)] for each in coefficients]) for name in ("host", "rest")
        )
        total: FloatArray = forward_s + backward_s + exposed_s + REST_S * rest + self.host_s * host
        return total

    def _parts(
        self, coefficients: Sequence[Coefficients]
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the seconds of forward, of backward and of exposed communication, each ``(b, c)``.

        Forward and backward include the contention by communication and by Horovod's cycles.
        """
        count, shape = len(self.host_s), (len(coefficients), len(self.host_s))
        factors = np.exp([astuple(each) for each in coefficients])
        # One row per pair of set and strategy: many rows take little more time than few.
        latency, byte, _, compute, contention, _ = np.repeat(factors, count, axis=0).T
        forward_s, backward_s = self.forward_s * compute, self.backward_s * compute
        if self.items is None:
            return forward_s.reshape(shape), backward_s.reshape(shape), np.zeros(shape)
        cycle_s, after_s, local, deferrable = (
            np.tile(each, len(coefficients))
            for each in (self.cycle_s, self.after_s, self.local, self.deferrable)
        )
        communicated_s, overlapped_s = self._communication(
            len(coefficients), latency, byte, compute
        )
        operation_s = cycle_s / 2 + self.latency_s * latency
        later_s = np.where(after_s > 0, operation_s + after_s * byte, 0.0)
        exposed_s = np.maximum(communicated_s - backward_s, 0.0) + later_s
        if (local > 1).any():
            # Averaging of parameters overlaps with nothing.
            loop = self._loop(len(coefficients), latency)
            of_round_s = round_s(loop, communicated_s, forward_s, backward_s, local)
            exposed_s = np.where(local > 1, of_round_s / local - forward_s - backward_s, exposed_s)
            overlapped_s = np.where(local > 1, 0.0, overlapped_s)
        hidden_s = deferrable * np.minimum(exposed_s, forward_s)
        shortest_s = CYCLE_BUSY_S + COORDINATION_SHARE * self.latency_s * latency
        busy_share = CYCLE_BUSY_S / np.maximum(cycle_s, shortest_s)
        slower = self.contention * contention
        forward_s = forward_s + slower * (hidden_s + busy_share * (forward_s - hidden_s))
        backward_s = backward_s + slower * (overlapped_s + busy_share * (backward_s - overlapped_s))
        exposed_s = exposed_s - hidden_s
        return forward_s.reshape(shape), backward_s.reshape(shape), exposed_s.reshape(shape)

    def ends(self, coefficients: Coefficients) -> FloatArray:
        """Return the end of each item of one strategy (``c`` is 1), in order.

        In seconds from the start of backward, or from the start of an averaging of parameters. It
        is computed as the end of a step that sends nothing after that item.
        """
        if self.items is None:
            return np.empty(0)
        there = np.flatnonzero(self.items.size_bytes[:, 0] > 0)
        count = len(there)
        upto = {
            f.name: np.repeat(getattr(self.items, f.name), count, axis=1) for f in fields(Items)
        }
        later = np.arange(len(self.items.size_bytes))[:, None] > there
        upto["size_bytes"] = np.where(later, 0.0, upto["size_bytes"])
        loop = Loop(*(np.repeat(getattr(self.loop, f.name), count) for f in fields(Loop)))
        factors = np.exp(astuple(coefficients))
        latency, byte, _, compute, _, _ = np.repeat(factors[:, None], count, axis=1)
        steps = replace(self, items=Items(**upto), loop=loop)
        end_s, _ = steps._communication(1, latency, byte, compute)
        return end_s

    def _communication(
        self, times: int, latency: FloatArray, byte: FloatArray, compute: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return :func:`communication` for each set (``times``) and strategy, each ``(b c,)``."""
        end_s, overlapped_s = np.empty((2, times, len(latency) // times))
        each_latency, each_byte, each_compute = (
            factor.reshape(times, -1) for factor in (latency, byte, compute)
        )
        for own, those in self._groups:
            loop = self._loop(times, each_latency[:, own].ravel(), own)
            arrival_s, size, wire_s, operations, alone, own_latency = (
                np.tile(getattr(those, field.name), (1, times)) for field in fields(Items)
            )
            items = Items(
                arrival_s * each_compute[:, own].ravel(),
                size,
                wire_s * each_byte[:, own].ravel(),
                operations,
                alone,
                own_latency,
            )
            found = communication(loop, items, self.backward_s * each_compute[:, own].ravel())
            end_s[:, own], overlapped_s[:, own] = (each.reshape(times, -1) for each in found)
        return end_s.ravel(), overlapped_s.ravel()

    def _loop(self, times: int, latency: FloatArray, own: Places | slice = slice(None)) -> Loop:
        """Return the background loop of the strategies ``own`` for each set of coefficients."""
        cycle_s, fusion_bytes, response_s = (
            np.tile(each[own], times)
            for each in (self.loop.cycle_s, self.loop.fusion_bytes, self.loop.response_s)
        )
        return Loop(cycle_s, fusion_bytes, response_s * latency)

    @cached_property
    def _groups(self) -> list[tuple[Places, Items]]:
        """Groups of strategies with similar numbers of items, and their items without gaps.

        The simulation loops over items, so strategies with few buckets are not simulated together
        with strategies with many tensors.
        """
        assert self.items is not None, "there are items"
        gone = self.items.size_bytes <= 0
        counts = len(gone) - gone.sum(axis=0)
        magnitudes = np.ceil(np.log2(np.maximum(counts, 1)))
        groups = []
        for magnitude in np.unique(magnitudes):
            own = np.flatnonzero(magnitudes == magnitude)
            order = np.argsort(gone[:, own], axis=0, kind="stable")[: counts[own].max()]
            of_items = (getattr(self.items, field.name)[:, own] for field in fields(Items))
            groups.append((own, Items(*(np.take_along_axis(e, order, axis=0) for e in of_items))))
        return groups
