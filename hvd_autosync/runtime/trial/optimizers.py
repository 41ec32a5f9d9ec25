"""The wrapped optimizers of a script."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from hvd_autosync.runtime.patches.checkpoints import call_on_checkpoint


class Optimizers:
    """Optimizers in the order of their creation; weak, so that the script can drop them.

    Args:
        on_save: Called when the script asks one of them for its states, as for a checkpoint: such a
            step takes longer.
        on_load: Called when the script loads a checkpoint into one of them.
    """

    def __init__(
        self, on_save: Callable[[], None], on_load: Callable[[], None] = lambda: None
    ) -> None:
        self._fixed: dict[weakref.ref[Any], frozenset[str]] = {}
        self._on_save, self._on_load = on_save, on_load
        self._watches = True
        self._hooks: list[RemovableHandle] = []

    def add(self, optimizer: Any, fixed: frozenset[str]) -> None:
        """Add one whose call fixes these knobs."""
        self._fixed[weakref.ref(optimizer)] = fixed
        if self._watches:
            self._hook(optimizer)

    def watch_saves(self) -> None:
        """Call ``on_save`` and ``on_load`` from now on, as at the beginning."""
        self.ignore_saves()
        self._watches = True
        for optimizer in self.living:
            self._hook(optimizer)

    def ignore_saves(self) -> None:
        """Leave nothing of ours in the optimizers, and call neither any more."""
        self._watches = False
        while self._hooks:
            self._hooks.pop().remove()

    def _hook(self, optimizer: Any) -> None:
        hook = optimizer.register_state_dict_pre_hook(lambda _: self._on_save())
        self._hooks += [hook, call_on_checkpoint(optimizer, self._on_load)]

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
