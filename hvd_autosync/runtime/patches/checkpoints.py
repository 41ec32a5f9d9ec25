"""Finds whether a script goes on from a checkpoint, from what its optimizers load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

#: How optimizers count their steps.
_NUMBERS = (int, float, torch.Tensor)


def call_on_checkpoint(optimizer: Any, loads: Callable[[], None]) -> RemovableHandle:
    """Call ``loads`` each time that an optimizer is about to load a state with steps in it.

    Its own state is none of a checkpoint: rank 0 may load that again when it was broadcast.

    Args:
        optimizer: The optimizer.
        loads: The function.

    Returns:
        What ends it.
    """

    def on_load(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
        own = {id(each) for each in optimizer.state.values()}
        states = [each for each in state_dict.get("state", {}).values() if id(each) not in own]
        if _have_stepped(states):
            loads()

    # Before the hook of a strategy optimizer, which may put another state in its place.
    handle: RemovableHandle = optimizer.register_load_state_dict_pre_hook(on_load, prepend=True)
    return handle


def _have_stepped(states: Sequence[Any]) -> bool:
    """Return whether an optimizer with these states of parameters has made a step.

    A new one has no states, or some that have counted no step.
    """
    entries = [each.get("step") for each in states if isinstance(each, Mapping)]
    counts = [torch.as_tensor(each) for each in entries if isinstance(each, _NUMBERS)]
    return any(bool(count.gt(0).any()) for count in counts) if counts else bool(states)
