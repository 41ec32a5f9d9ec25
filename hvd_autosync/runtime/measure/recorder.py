"""The durations, waiting times and losses of a run's steps.

What happens per step costs about a microsecond: a clock reading and two appends.
"""

from __future__ import annotations

import math
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hvd_autosync.runtime.measure.losses import Losses

if TYPE_CHECKING:
    import torch


class Recorder:
    """Counts steps in the training's thread, hands them over in the sender's.

    Attributes:
        step_s: Seconds of each step, from the end of the step before.
        blocked_s: Seconds of each step spent waiting for communication.
        blocked: Seconds waited so far in the step that runs.
        losses: The loss of the step that runs.
    """

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.blocked_s: list[float] = []
        self.blocked = 0.0
        self.losses = Losses()
        self._losses_before = 0
        self._losses: list[torch.Tensor] = []
        self._handed_over = 0
        self._last_end = perf_counter()

    def end_step(self) -> None:
        """The running step ends now."""
        now = perf_counter()
        self.step_s.append(now - self._last_end)
        self.blocked_s.append(self.blocked)
        self._last_end = now
        self.blocked = 0.0
        loss = self.losses.since(self._losses_before)
        if loss is not None:
            self._losses.append(loss)
            self._losses_before = self.losses.count

    def restart_clock(self) -> None:
        """Let the running step begin now, so that what we did meanwhile is in no step."""
        self._last_end = perf_counter()

    def take_news(self, *, wait_for_device: bool) -> dict[str, Any]:
        """The ``steps`` message with what was not handed over yet.

        Args:
            wait_for_device: Convert losses that are on an accelerator too. That waits for the
                device, so only the training's thread asks for it, and only where it has to wait
                anyway.
        """
        first, count = self._handed_over, len(self.blocked_s)
        self._handed_over = count
        ready = self._losses[:]
        if not wait_for_device and any(loss.device.type != "cpu" for loss in ready):
            ready = []
        del self._losses[: len(ready)]
        return {
            "type": "steps",
            "first": first,
            "step_s": self.step_s[first:count],
            "blocked_s": self.blocked_s[first:count],
            "losses": [_as_float(loss) for loss in ready],
        }


def _as_float(loss: torch.Tensor) -> float | None:
    """The loss as a number; ``None`` when it is not finite, for JSON has no such numbers."""
    value = float(loss)
    return value if math.isfinite(value) else None
