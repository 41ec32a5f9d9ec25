"""Step classifier: which calls of ``optimizer.step()`` are the steps of a training."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from hvd_autosync.runtime.collectives.operations import of_some_ranks

#: An optimizer that steps this often while the counted one does not is counted instead.
_PATIENCE = 32


class StepClassifier:
    """Distinguishes training steps from calls that are a part of one.

    The first optimizer that steps is counted; the steps of others, as of a second network, are part
    of its steps. A counted optimizer that is not used any more is replaced: at once by one of the
    same first parameter, as where a script wraps its model again, by others after a while. One of a
    process set is never counted. From the first mark of the script on, only marks are counted.

    Attributes:
        marked: Whether the script has marked a step.
        other_model: Whether an optimizer was replaced by one whose parameters have other shapes:
            times of steps since then tell nothing of those before.
    """

    def __init__(self) -> None:
        # Weak, so that an optimizer that the script drops is collected.
        self._counted: weakref.ref[Any] | None = None
        self._first: Callable[[], Any] = _nothing
        self._shapes: list[Any] = []
        self._others_steps = 0
        self._counts_next = False
        self.marked = self.other_model = False

    def count_next(self) -> None:
        """Count the next other optimizer that steps, as where two step after one backward pass.

        A step then ends with that one. Call it after the same step on all ranks.
        """
        self._counts_next = True

    def is_step(self, optimizer: Any) -> bool:
        """Return whether a step ends with this call of ``optimizer``'s."""
        if self.marked or of_some_ranks(optimizer):
            return False
        # Ranks collect a dropped optimizer at different times, and must count the same steps.
        if self._counted is None or optimizer is not self._counted():
            first = next(iter(_parameters(optimizer)), None)
            again = first is not None and first is self._first()
            self._others_steps += 1
            waits = self._others_steps < _PATIENCE and not self._counts_next
            if self._counted is not None and not again and waits:
                return False
            with torch._C.DisableTorchFunctionSubclass():  # else deferred steps would be made
                shapes = [parameter.shape for parameter in _parameters(optimizer)]
            same = self._counts_next or shapes == self._shapes
            self.other_model |= self._counted is not None and not same
            self._counts_next = False
            self._counted, self._shapes = weakref.ref(optimizer), shapes
            self._first = weakref.ref(first) if first is not None else _nothing
        self._others_steps = 0
        return True


def _nothing() -> None:
    """Of an optimizer without parameters."""


def _parameters(optimizer: Any) -> list[Any]:
    groups = getattr(optimizer, "param_groups", ())
    return [parameter for group in groups for parameter in group["params"]]
