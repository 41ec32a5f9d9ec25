"""Step classifier: which calls of ``optimizer.step()`` are the steps of a training."""

from __future__ import annotations

import weakref
from typing import Any

#: An optimizer that steps this often while the counted one does not is counted instead.
_PATIENCE = 32


class StepClassifier:
    """Distinguishes training steps from calls that are a part of one.

    The first optimizer that steps is counted; the steps of others, as of a second network, are part
    of its steps. A counted optimizer that is not used any more is replaced. From the first mark of
    the script on, only marks are counted.
    """

    def __init__(self) -> None:
        # Weak, so that an optimizer that the script drops is collected.
        self._counted: weakref.ref[Any] | None = None
        self._others_steps = 0
        self.marked = False

    def is_step(self, optimizer: Any) -> bool:
        """Whether a step ends with this call of ``optimizer``'s."""
        if self.marked:
            return False
        # Ranks collect a dropped optimizer at different times, and must count the same steps.
        if self._counted is None or optimizer is not self._counted():
            self._others_steps += 1
            if self._counted is not None and self._others_steps < _PATIENCE:
                return False
            self._counted = weakref.ref(optimizer)
        self._others_steps = 0
        return True
