"""Horovod's own exchange as a method, for optimizers of ranks that cannot begin together."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from hvd_autosync.runtime.method import SyncMethod


class HorovodsExchange(SyncMethod):
    """Horovod's own exchange, by Horovod's own code.

    Optimizers of elastic jobs begin with it, because it needs no agreement of the ranks: some may
    create their optimizers while others are in the middle of a training.

    Args:
        optimizer: Horovod's optimizer, of our class.
        synchronize: ``synchronize`` of Horovod's class.
    """

    def __init__(self, optimizer: Any, synchronize: Callable[[Any], None]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._synchronize = synchronize

    def on_gradient_ready(self, parameter: torch.nn.Parameter) -> None:
        """The gradient of ``parameter`` is complete."""
        if (optimizer := self._optimizer()) is not None:
            optimizer._handles[parameter] = optimizer._allreduce_grad_async(parameter)

    def on_synchronize(self, *, in_step: bool, fresh: bool) -> None:
        """Wait until gradients can be used."""
        self._synchronize(self._optimizer())
