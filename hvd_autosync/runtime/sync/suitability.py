"""Refuses optimizers that cannot be trained under a protocol, before or in their first steps."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.state.group_swap import own_class
from hvd_autosync.search_space.protocol import Protocol

_HINT = "Leave protocol knobs out of the strategy of such a script."
_ALONE_HINT = "Leave the knob stragglers at none where a script has several optimizers."
#: The phases of the optimizers that have made the last two steps of this process.
_stepped: deque[weakref.ref[Any]] = deque(maxlen=2)


def check_alone(phases: Any, protocol: Protocol) -> None:
    """Return if optimizers do not make steps in turn; to be called after each of them.

    Args:
        phases: Of the optimizer that has made a step.
        protocol: Its protocol.

    Raises:
        ConfigurationError: They do, and stragglers are to be treated.
    """
    before_last, last = ([None, None, *(each() for each in _stepped)])[-2:]
    _stepped.append(weakref.ref(phases))
    if protocol.stragglers != "none" and before_last is phases is not last:
        raise ConfigurationError(
            f"stragglers={protocol.stragglers!r} and two optimizers that make steps in turn: ranks "
            "that one of them lets go on alone are together in the steps of the other",
            hint=_ALONE_HINT,
        )


def check_balance(protocol: Protocol, *, local_steps: bool, passes_per_step: int) -> None:
    """Return if ranks may have batches of different sizes.

    Args:
        protocol: The protocol.
        local_steps: Whether replicas make steps of their own.
        passes_per_step: Calls of ``backward()`` in a step.

    Raises:
        ConfigurationError: They may not.
    """
    if protocol.stragglers != "balance":
        return
    if local_steps:
        raise ConfigurationError(
            "stragglers='balance' with local steps: replicas that step on their own cannot weigh "
            "batches of different sizes against each other",
            hint="Set stragglers or local_steps, not both.",
        )
    if passes_per_step > 1:
        raise ConfigurationError(
            f"stragglers='balance' with backward_passes_per_step={passes_per_step}: a script may "
            "divide a batch by its size, which will change",
            hint="Leave the knob stragglers at none for such a script.",
        )


def check_optimizer(optimizer: Any) -> None:
    """Return if the owners of its parameters can step an optimizer of our class.

    Raises:
        ConfigurationError: It cannot.
    """
    chosen = own_class(optimizer)
    if chosen is torch.optim.SparseAdam:
        raise ConfigurationError(
            "SparseAdam takes sparse gradients only, and those that travel to the owners of "
            "parameters are dense",
            hint=_HINT,
        )
    if chosen is torch.optim.LBFGS:
        raise ConfigurationError(
            "LBFGS looks at all parameters of the model at once, and their owners at shares",
            hint=_HINT,
        )
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ConfigurationError(
            f"{chosen.__name__} has no learning rate of the script's, by which owners make steps",
            hint=_HINT,
        )
