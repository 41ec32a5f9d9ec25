"""The loss of the step that runs, as ``backward()`` or the script itself tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Losses:
    """Keeps the last loss of the step that runs."""

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None
        self._reported = False

    def seen(self, loss: torch.Tensor) -> None:
        """A scalar whose ``backward()`` was called; of no account once the script reports."""
        if not self._reported:
            self._last = loss

    def report(self, loss: torch.Tensor) -> None:
        """What the script calls its loss."""
        self._reported = True
        self._last = loss

    def take(self) -> torch.Tensor | None:
        """The loss of the step that ends, detached; ``None`` if there was none."""
        last, self._last = self._last, None
        return last
