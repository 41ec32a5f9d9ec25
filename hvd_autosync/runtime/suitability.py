"""Refuses optimizers that cannot be trained under a protocol, before the first step."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.substitution import own_class
from hvd_autosync.search_space.protocol import Protocol

_HINT = "Leave protocol knobs out of the strategy of such a script."
_ALONE_HINT = "Leave the knob stragglers at none where a script has several optimizers."
#: Optimizers that have phases.
_PHASED: weakref.WeakKeyDictionary[Any, Protocol] = weakref.WeakKeyDictionary()


def check_phases(optimizer: Any, protocol: Protocol) -> None:
    """Return if ``optimizer``, of our class, can have the phases of ``protocol``.

    Raises:
        ConfigurationError: It cannot.
    """
    chosen = own_class(optimizer)
    if chosen is torch.optim.SparseAdam:
        raise ConfigurationError(
            "SparseAdam takes sparse gradients only, and those that travel to the owners of "
            "parameters are dense", hint=_HINT,
        )  # fmt: skip
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
    if _PHASED:
        gc.collect()  # of those that the script has dropped
    watching = [each for each in (protocol, *_PHASED.values()) if each.stragglers != "none"]
    if _PHASED and watching:
        raise ConfigurationError(
            f"stragglers={watching[0].stragglers!r} and two optimizers: ranks that one of them "
            "lets go on alone are together in the steps of the other", hint=_ALONE_HINT,
        )  # fmt: skip
    _PHASED[optimizer] = protocol
