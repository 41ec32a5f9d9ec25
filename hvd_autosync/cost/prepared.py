"""Steps under some strategies, ready to be timed under any coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hvd_autosync.cost.coefficients import LOOK_S, LOOKING_SHARE, REST_S, Coefficients
from hvd_autosync.cost.timeline import FloatArray, Items, Loop, communication

#: Indices of strategies.
Places = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Prepared:
    """Steps under ``c`` strategies, up to the coefficients.

    Attributes:
        items: What travels; ``None`` where nothing does.
        loop: Horovod's loop.
        host_s: Seconds of work on gradients in memory, shape ``(c,)``.
        local: Steps of a round of local steps, shape ``(c,)``; 1: gradients travel in every step.
        late: Share of what layers may wait for until before their next forward, shape ``(c,)``: 0
            where they do not wait; what is fused ends together, and nothing is left to hide.
        contention: Seconds that a second of communication behind computation adds to it.
        forward_s: Of one step.
        backward_s: Of one step.
        look_s: Pause between two looks of Horovod's loop, shape ``(c,)``, whether or not it is
            what carries ``items``.
        latency_s: Seconds of an operation without its bytes, its response remembered.
    """

    items: Items | None
    loop: Loop
    host_s: FloatArray
    local: FloatArray
    late: FloatArray
    contention: float
    forward_s: float
    backward_s: float
    look_s: FloatArray
    latency_s: float

    def seconds(self, coefficients: Sequence[Coefficients]) -> FloatArray:
        """Seconds of a step, shape ``(b, c)`` for ``b`` sets of coefficients."""
        forward_s, backward_s, exposed_s = self._parts(coefficients)
        host, rest = (
            np.exp([[getattr(each, name)] for each in coefficients]) for name in ("host", "rest")
        )
        total: FloatArray = forward_s + backward_s + exposed_s + REST_S * rest + self.host_s * host
        return total

    def _parts(
        self, coefficients: Sequence[Coefficients]
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Seconds of forward, of backward, and of communication behind neither, each ``(b, c)``.

        Forward and backward with what communication and Horovod's looks add to them.
        """
        count, shape = len(self.host_s), (len(coefficients), len(self.host_s))
        factors = np.exp([astuple(each) for each in coefficients])
        # One row per pair: a simulation of many rows costs little more than one of few.
        latency, byte, _, compute, contention, _ = np.repeat(factors, count, axis=0).T
        forward_s, backward_s = self.forward_s * compute, self.backward_s * compute
        if self.items is None:
            return forward_s.reshape(shape), backward_s.reshape(shape), np.zeros(shape)
        look_s, local, late = (
            np.tile(each, len(coefficients)) for each in (self.look_s, self.local, self.late)
        )
        communicated_s, busy_s = self._communication(len(coefficients), latency, byte, compute)
        # Averages of parameters hide behind nothing.
        exposed_s = np.where(
            local > 1, communicated_s / local, np.maximum(communicated_s - backward_s, 0.0)
        )
        behind_s = np.where(local > 1, 0.0, np.clip(busy_s - exposed_s, 0.0, backward_s))
        hidden_s = late * np.minimum(exposed_s, forward_s)
        looks = LOOK_S / np.maximum(look_s, LOOK_S + LOOKING_SHARE * self.latency_s * latency)
        slower = self.contention * contention
        forward_s = forward_s + slower * (hidden_s + looks * (forward_s - hidden_s))
        backward_s = backward_s + slower * (behind_s + looks * (backward_s - behind_s))
        exposed_s = exposed_s - hidden_s
        return forward_s.reshape(shape), backward_s.reshape(shape), exposed_s.reshape(shape)

    def ends(self, coefficients: Coefficients) -> FloatArray:
        """When each item that travels is through, of one strategy (``c`` is 1), in order.

        In seconds from the start of backward, or from the start of an average of parameters.
        Each is the end of a step that sends nothing after that item.
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
        """:func:`communication` for each of ``times`` sets and strategy, each ``(b c,)``."""
        end_s, busy_s = np.empty((2, times, len(latency) // times))
        each_latency, each_byte, each_compute = (
            factor.reshape(times, -1) for factor in (latency, byte, compute)
        )
        for own, those in self._groups:
            loop = Loop(
                np.tile(self.loop.cycle_s[own], times),
                np.tile(self.loop.fusion_bytes[own], times),
                np.tile(self.loop.response_s[own], times) * each_latency[:, own].ravel(),
            )
            arrival_s, size, wire_s, operations, alone = (
                np.tile(getattr(those, field.name), (1, times)) for field in fields(Items)
            )
            items = Items(
                arrival_s * each_compute[:, own].ravel(),
                size,
                wire_s * each_byte[:, own].ravel(),
                operations,
                alone,
            )
            found = communication(loop, items)
            end_s[:, own], busy_s[:, own] = (each.reshape(times, -1) for each in found)
        return end_s.ravel(), busy_s.ravel()

    @cached_property
    def _groups(self) -> list[tuple[Places, Items]]:
        """Strategies with about as many items each, and those items without gaps.

        A simulation goes item by item: a strategy of few buckets must not wait for the many tensors
        of another.
        """
        assert self.items is not None, "something travels"
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
