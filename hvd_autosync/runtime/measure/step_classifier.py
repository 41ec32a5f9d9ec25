"""Which calls of ``optimizer.step()`` are the steps of a training."""

from __future__ import annotations

import weakref
from typing import Any

#: An optimizer that steps this often while the counted one rests is counted instead.
_PATIENCE = 32


class StepClassifier:
    """Tells steps from the calls that are a part of one.

    The first optimizer that steps is counted; the steps of others, as of a second network's, are
    part of its steps. One that is never used again is replaced. From the first mark of the script
    on, nothing but marks is counted.
    """

    def __init__(self) -> None:
        # Weakly, so that what the script drops is gone.
        self._counted: weakref.ref[Any] | None = None
        self._others_steps = 0
        self.marked = False

    def is_step(self, optimizer: Any) -> bool:
        """Whether a step ends with this call of ``optimizer``'s."""
        if self.marked:
            return False
        counted = self._counted() if self._counted is not None else None
        if optimizer is not counted:
            self._others_steps += 1
            if counted is not None and self._others_steps < _PATIENCE:
                return False
            self._counted = weakref.ref(optimizer)
        self._others_steps = 0
        return True
