"""Records the durations, waiting times and losses of a run's steps.

It costs about a microsecond per step: a clock reading and two appends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hvd_autosync.runtime.measure.losses import Losses

if TYPE_CHECKING:
    import torch


class Recorder:
    """Records steps in the training's thread; the sender's thread takes them.

    Args:
        in_round: As of :class:`Losses`.

    Attributes:
        step_s: Seconds of each step, from the end of the step before.
        blocked_s: Seconds of each step spent waiting for communication.
        blocked: Seconds waited so far in the current step.
        losses: The losses of the current step.
        untypical: Indices of the steps that are not like the others.
        unlike: Events in the current step that others do not contain, such as an evaluation.
    """

    def __init__(self, in_round: Callable[[], bool] = lambda: False) -> None:
        self.step_s: list[float] = []
        self.blocked_s: list[float] = []
        self.blocked = 0.0
        self.losses = Losses(in_round)
        self.untypical: list[int] = []
        self.unlike = 0
        self._losses_before = 0
        #: Losses, and whether replicas differed at each.
        self._losses: list[tuple[torch.Tensor, bool]] = []
        self._last_loss: torch.Tensor | None = None
        self._taken = 0
        self._last_end = perf_counter()

    def end_step(self, *, typical: bool = True, more_s: float = 0.0) -> None:
        """End the current step.

        One whose loss is left out repeats the last one: the losses of all ranks are of the same
        steps.

        Args:
            typical: Whether it is like the others: no evaluation, no checkpoint, no new epoch.
            more_s: Seconds that count as its own beside those since the step before.
        """
        now = perf_counter()
        if not typical:
            self.untypical.append(len(self.step_s))
        self.unlike = 0
        self.step_s.append(now - self._last_end + more_s)
        self.blocked_s.append(self.blocked)
        self._last_end = now
        self.blocked = 0.0
        loss, self._losses_before, left_out = self.losses.end_step(self._losses_before)
        if left_out:
            loss = self._last_loss
        if loss is not None:
            self._losses.append((loss, self.losses.in_round))
            self._last_loss = loss

    def restart_clock(self) -> None:
        """Restart the current step now, so that our own work before is in no step."""
        self._last_end = perf_counter()

    def take_news(self, *, wait_for_device: bool) -> dict[str, Any]:
        """Return the ``steps`` message with what was not taken yet.

        Args:
            wait_for_device: Convert losses on an accelerator too. That waits for the device, so
                only the training's thread requests it, and only where it has to wait anyway.
        """
        first, count = self._taken, len(self.blocked_s)
        self._taken = count
        ready = self._losses[:]
        if not wait_for_device and any(loss.device.type != "cpu" for loss, _ in ready):
            ready = []
        del self._losses[: len(ready)]
        return {
            "type": "steps",
            "first": first,
            "step_s": self.step_s[first:count],
            "blocked_s": self.blocked_s[first:count],
            "losses": [_as_float(loss) for loss, _ in ready],
            "in_round": [index for index, (_, in_round) in enumerate(ready) if in_round],
            "several_losses": self.losses.several,
            "untypical": [index for index in self.untypical if first <= index < count],
            "unlike": self.unlike,
        }


def _as_float(loss: torch.Tensor) -> float | None:
    """Return the loss as a number; ``None`` if it is not finite, since JSON has no such numbers."""
    value = float(loss)
    return value if math.isfinite(value) else None
