"""The wrapped optimizers of a script."""

from __future__ import annotations

import gc
import weakref
from typing import Any


class Optimizers:
    """Optimizers in the order of their creation; weak, so that the script can drop them."""

    def __init__(self) -> None:
        self._fixed: dict[weakref.ref[Any], frozenset[str]] = {}

    def add(self, optimizer: Any, fixed: frozenset[str]) -> None:
        """Add one whose call fixes these knobs."""
        self._fixed[weakref.ref(optimizer)] = fixed

    @property
    def all(self) -> list[Any]:
        """All; ``None``: one that the script has dropped."""
        return [each() for each in self._fixed]

    @property
    def living(self) -> list[Any]:
        """Those that the script still holds."""
        return [optimizer for optimizer in self.all if optimizer is not None]

    @property
    def fixed(self) -> tuple[str, ...]:
        """Knobs that the calls of all have fixed, also of those that were dropped."""
        every = self._fixed.values()
        return tuple(sorted(frozenset.intersection(*every))) if every else ()

    def forget_dropped(self) -> None:
        """Give the places of dropped ones to those that came later.

        Ranks of an elastic job have dropped different ones, as some are new.
        """
        gc.collect()  # they may be in cycles
        self._fixed = {each: own for each, own in self._fixed.items() if each() is not None}
