"""An optimizer's states while parts of them are elsewhere."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


class OptimizerStates(defaultdict[Any, Any]):
    """An optimizer's dictionary of states, without those that others have between steps.

    Attributes:
        cleared: Whether the script has cleared it since they have them.
    """

    cleared = False

    @classmethod
    def put_into(cls, optimizer: Any) -> OptimizerStates:
        """Let an optimizer have such a dictionary, not cleared yet; return it."""
        if not isinstance(optimizer.state, cls):
            optimizer.state = cls(dict, optimizer.state)
        states: OptimizerStates = optimizer.state
        states.cleared = False
        return states

    def clear(self) -> None:
        """As of ``dict``."""
        super().clear()
        self.cleared = True

    def reset_in(self, optimizer: Any) -> bool:
        """Return whether the script has reset the states of an optimizer, which had this."""
        return self.cleared or optimizer.state is not self
