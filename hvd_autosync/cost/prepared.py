"""Steps under some strategies, ready to be timed under any coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace

import numpy as np

from hvd_autosync.cost.coefficients import REST_S, Coefficients
from hvd_autosync.cost.timeline import FloatArray, Items, Loop, communication


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
        contention: Seconds that a second of communication behind backward adds to it.
        forward_s: Of one step.
        backward_s: Of one step.
    """

    items: Items | None
    loop: Loop
    host_s: FloatArray
    local: FloatArray
    late: FloatArray
    contention: float
    forward_s: float
    backward_s: float

    def seconds(self, coefficients: Sequence[Coefficients]) -> FloatArray:
        """Seconds of a step, shape ``(b, c)`` for ``b`` sets of coefficients."""
        count, shape = len(self.host_s), (len(coefficients), len(self.host_s))
        factors = np.exp([astuple(each) for each in coefficients])
        # One row per pair: a simulation of many rows costs little more than one of few.
        latency, byte, host, compute, contention, rest = np.repeat(factors, count, axis=0).T
        forward_s, backward_s = self.forward_s * compute, self.backward_s * compute
        end_s = backward_s
        if self.items is not None:
            communicated_s, busy_s = self._communication(len(coefficients), latency, byte, compute)
            local = np.tile(self.local, len(coefficients))
            # Averages of parameters hide behind nothing.
            exposed_s = np.where(
                local > 1, communicated_s / local, np.maximum(communicated_s - backward_s, 0.0)
            )
            late = np.tile(self.late, len(coefficients))
            hidden_s = late * np.minimum(exposed_s, forward_s)
            behind_s = np.where(local > 1, 0.0, np.clip(busy_s - exposed_s, 0.0, backward_s))
            slowed_s = self.contention * contention * behind_s
            end_s = backward_s + slowed_s + exposed_s - hidden_s
        host_s = np.tile(self.host_s, len(coefficients)) * host
        total: FloatArray = forward_s + REST_S * rest + end_s + host_s
        return total.reshape(shape)

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
        assert self.items is not None, "something travels"
        loop = Loop(
            np.tile(self.loop.cycle_s, times), np.tile(self.loop.fusion_bytes, times),
            np.tile(self.loop.response_s, times) * latency,
        )  # fmt: skip
        arrival_s, size, wire_s, operations, alone = (
            np.tile(getattr(self.items, field.name), (1, times)) for field in fields(Items)
        )
        items = Items(arrival_s * compute, size, wire_s * byte, operations, alone)
        return communication(loop, items)
