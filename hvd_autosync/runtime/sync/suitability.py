"""Rejects optimizers that cannot be trained under a protocol, before or in their first steps."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NoReturn

import torch

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.collectives.operations import once_per_rank
from hvd_autosync.runtime.state.group_swap import own_class
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.util.amounts import amount, be

_HINT = "Leave the protocol knobs out of the strategy of this script."
_ALONE_HINT = "Leave the knob stragglers at none for a script with several optimizers."


@once_per_rank
def _stepped() -> deque[weakref.ref[Any]]:
    """Return the phases of the optimizers that made the last two steps of this rank."""
    return deque(maxlen=2)


def check_alone(phases: Any, protocol: Protocol) -> None:
    """Check that optimizers do not step in turn; called after each step.

    Args:
        phases: Those of the optimizer that has made a step.
        protocol: Its protocol.

    Raises:
        ConfigurationError: They step in turn, and the protocol handles stragglers.
    """
    before_last, last = ([None, None, *(each() for each in _stepped())])[-2:]
    _stepped().append(weakref.ref(phases))
    if protocol.stragglers != "none" and before_last is phases is not last:
        raise ConfigurationError(
            f"stragglers={protocol.stragglers!r} with two optimizers that step in turn: ranks that "
            "continue alone under one of them wait for each other in the steps of the other",
            hint=_ALONE_HINT,
        )


def check_balance(protocol: Protocol, *, local_steps: bool, passes_per_step: int) -> None:
    """Check that ranks may have batches of different sizes.

    Args:
        protocol: The protocol.
        local_steps: Whether replicas make local steps.
        passes_per_step: Calls of ``backward()`` in a step.

    Raises:
        ConfigurationError: They may not.
    """
    if protocol.stragglers != "balance":
        return
    if local_steps:
        raise ConfigurationError(
            "stragglers='balance' with local steps: replicas that step separately cannot weight "
            "batches of different sizes",
            hint="Set stragglers or local_steps, not both.",
        )
    if passes_per_step > 1:
        raise ConfigurationError(
            f"stragglers='balance' with backward_passes_per_step={passes_per_step}: the script may "
            "split each batch by its size, and dynamic batching changes that size",
            hint="Leave the knob stragglers at none for this script.",
        )


def refuse_split_batches() -> NoReturn:
    """Refuse a script that splits a batch whose size dynamic batching has changed.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(
        "stragglers='balance': the script calls backward() more often than before, because its "
        "batch has grown",
        hint="Leave the knob stragglers at none for a script that splits its batches.",
    )


def check_owned(optimizer: Any) -> None:
    """Check that parameter servers step all that an optimizer of our class would step.

    Horovod reduces the gradients of those parameters that could be trained when the optimizer was
    wrapped; each rank steps others by its own gradients, and a parameter server none of them.

    Raises:
        ConfigurationError: The script has unfrozen others since.
    """
    owned = optimizer._requires_update
    others = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and parameter not in owned
    ]
    if count := len(others):
        raise ConfigurationError(
            f"{amount(count, 'parameter')} {be(count, past=True)} frozen when the optimizer was "
            f"wrapped, and {be(count)} trained now: no parameter server has what was frozen then, "
            "and Horovod does not reduce its gradients either",
            hint="Wrap a new optimizer when layers are unfrozen, or freeze them after wrapping.",
        )


def refuse_more_parameters() -> NoReturn:
    """Refuse parameters that a script adds to an optimizer of our class.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(
        "add_param_group() of an optimizer under a protocol without a barrier: no parameter server "
        "would step the added parameters, and Horovod would not reduce their gradients either",
        hint="Wrap a new optimizer that has all parameters, or leave the protocol knobs out of the "
        "strategy of this script.",
    )


def check_optimizer(optimizer: Any) -> None:
    """Check that parameter servers can step an optimizer of our class.

    Raises:
        ConfigurationError: They cannot.
    """
    chosen = own_class(optimizer)
    if chosen is torch.optim.SparseAdam:
        raise ConfigurationError(
            "SparseAdam takes sparse gradients only, and parameter servers receive dense ones",
            hint=_HINT,
        )
    if chosen is torch.optim.LBFGS:
        raise ConfigurationError(
            "LBFGS needs all parameters of the model at once, and parameter servers have shares",
            hint=_HINT,
        )
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ConfigurationError(
            f"{chosen.__name__} has no learning rate set by the script, which parameter servers "
            "need",
            hint=_HINT,
        )
