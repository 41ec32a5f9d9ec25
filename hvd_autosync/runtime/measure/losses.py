"""The losses of this process's steps, as ``backward()`` or the script itself tells them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Losses:
    """Keeps the last loss.

    Attributes:
        count: How many there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last: torch.Tensor | None = None
        self._reported = False

    def seen(self, loss: torch.Tensor) -> None:
        """A number whose ``backward()`` was called; of no account once the script reports."""
        if not self._reported:
            self._take(loss)

    def report(self, loss: torch.Tensor) -> None:
        """What the script calls its loss."""
        self._reported = True
        self._take(loss)

    def since(self, count: int) -> torch.Tensor | None:
        """The last loss, without dimensions, if there was any after the first ``count``."""
        return self._last if self.count > count else None

    def _take(self, loss: torch.Tensor) -> None:
        # The script may change its own in place, before it is read.
        self._last = loss.reshape(()).clone()
        self.count += 1
