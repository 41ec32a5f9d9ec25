"""The losses of this process's steps, from ``backward()`` or reported by the script."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Losses:
    """Keeps the last loss.

    Attributes:
        count: Number of losses so far.
    """

    def __init__(self) -> None:
        self.count = 0
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
        """The last loss, without dimensions, if there was any after the first ``count``."""
        return self._last if self.count > count else None

    def _take(self, loss: torch.Tensor) -> None:
        # A copy: the script may change its tensor in place before this one is read.
        self._last = loss.reshape(()).clone()
        self.count += 1
