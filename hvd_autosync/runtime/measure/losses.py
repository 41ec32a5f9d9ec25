"""The losses of this process's steps, from ``backward()`` or reported by the script."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Losses:
    """Keeps the last loss.

    Args:
        in_round: Whether replicas differ now, in a round of local steps.

    Attributes:
        count: Number of losses so far.
        in_round: Whether replicas differed at the last loss, so that it was not their average's.
    """

    def __init__(self, in_round: Callable[[], bool] = lambda: False) -> None:
        self.count = 0
        self.in_round = False
        self._in_round_now = in_round
        self._last: torch.Tensor | None = None
        self._reported = False

    def seen(self, loss: torch.Tensor) -> None:
        """Record a scalar whose ``backward()`` was called; ignored once the script reports."""
        if not self._reported:
            self._take(loss)

    def report(self, loss: torch.Tensor) -> None:
        """Record the loss that the script reports."""
        self._reported = True
        self._take(loss)

    def since(self, count: int) -> torch.Tensor | None:
        """Return the last loss, without dimensions, if there was any after the first ``count``."""
        return self._last if self.count > count else None

    def _take(self, loss: torch.Tensor) -> None:
        # A copy: the script may change its tensor in place before this one is read.
        self._last = (loss.reshape(()) if loss.dim() else loss).clone()
        self.in_round = self._in_round_now()
        self.count += 1
