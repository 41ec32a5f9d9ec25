"""Multiplies gradients by what the batch that they are of counts, as ``backward`` makes them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

#: What the next gradient counts, as the last one who asked for it says while it lives.
_weight: weakref.WeakMethod[Callable[[], float]] | None = None


def weight_backward(weight: Callable[[], float]) -> None:
    """Let every ``backward()`` of this process from now on make gradients times ``weight()``.

    Args:
        weight: A method, which is asked as long as its object lives.
    """
    global _weight
    _weight = weakref.WeakMethod(weight)
    _watch()


@functools.cache
def _watch() -> None:
    # Where Tensor.backward() ends up, too.
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def weighted_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        weight = None if _weight is None else _weight()
        # Within another backward, as checkpoints of activations have it, gradients have theirs.
        factor = 1.0 if weight is None or torch._C._current_graph_task_id() != -1 else weight()
        if factor == 1.0:
            backward(tensors, *args, **kwargs)
        else:
            gradients = kwargs.pop("grad_tensors", None) if not args else args[0]
            backward(tensors, _weighted(factor, tensors, gradients), *args[1:], **kwargs)

    vars(torch.autograd)["backward"] = weighted_backward


def _weighted(factor: float, tensors: Any, gradients: Any) -> list[torch.Tensor]:
    """The gradients to begin with, for a loss or several, times ``factor``."""
    if isinstance(tensors, torch.Tensor):
        tensors, gradients = (tensors,), (gradients,)
    given = [None] * len(tensors) if gradients is None else gradients
    return [
        torch.full_like(tensor, factor) if gradient is None else gradient * factor
        for tensor, gradient in zip(tensors, given, strict=True)
    ]
