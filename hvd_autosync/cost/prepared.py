"""Steps under some strategies, ready to be timed under any coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
import numpy.typing as npt

from hvd_autosync.cost.coefficients import REST_S, Coefficients
from hvd_autosync.cost.timeline import FloatArray, Items, Loop, communication_end


@dataclass(frozen=True)
class Prepared:
    """Steps under ``c`` strategies, up to the coefficients.

    Attributes:
        items: What travels; ``None`` where nothing does.
        loop: Horovod's loop.
        host_s: Seconds of work on gradients in memory, shape ``(c,)``.
        local: Steps of a round of local steps, shape ``(c,)``; 1: gradients travel in every step.
        late: Whether layers wait until before their next forward, shape ``(c,)``.
        forward_s: Of one step.
        backward_s: Of one step.
    """

    items: Items | None
    loop: Loop
    host_s: FloatArray
    local: FloatArray
    late: npt.NDArray[np.bool_]
    forward_s: float
    backward_s: float

    def seconds(self, coefficients: Sequence[Coefficients]) -> FloatArray:
        """Seconds of a step, shape ``(b, c)`` for ``b`` sets of coefficients."""
        count, shape = len(self.host_s), (len(coefficients), len(self.host_s))
        factors = np.exp([astuple(each) for each in coefficients])
        # One row per pair: a simulation of many rows costs little more than one of few.
        latency, byte, host, compute, rest = np.repeat(factors, count, axis=0).T
        forward_s, backward_s = self.forward_s * compute, self.backward_s * compute
        end_s = backward_s
        if self.items is not None:
            communicated_s = self._communicated_s(len(coefficients), latency, byte, compute)
            local = np.tile(self.local, len(coefficients))
            # Averages of parameters hide behind nothing.
            exposed_s = np.where(
                local > 1, communicated_s / local, np.maximum(communicated_s - backward_s, 0.0)
            )
            late = np.tile(self.late, len(coefficients))
            hidden_s = np.where(late, np.minimum(exposed_s, forward_s), 0.0)
            end_s = backward_s + exposed_s - hidden_s
        host_s = np.tile(self.host_s, len(coefficients)) * host
        total: FloatArray = forward_s + REST_S * rest + end_s + host_s
        return total.reshape(shape)

    def _communicated_s(
        self, times: int, latency: FloatArray, byte: FloatArray, compute: FloatArray
    ) -> FloatArray:
        """When the last item is through, for each of ``times`` sets and strategy, ``(b c,)``."""
        assert self.items is not None, "something travels"
        loop = Loop(
            np.tile(self.loop.cycle_s, times), np.tile(self.loop.fusion_bytes, times),
            np.tile(self.loop.response_s, times) * latency,
        )  # fmt: skip
        arrival_s, size, wire_s, operations, alone = (
            np.tile(getattr(self.items, field.name), (1, times)) for field in fields(Items)
        )
        items = Items(arrival_s * compute, size, wire_s * byte, operations, alone)
        return communication_end(loop, items)
