"""Multiplies gradients by the gradient weight of their batch, in ``backward``."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from hvd_autosync.runtime.collectives.operations import once_per_rank
from hvd_autosync.util import patches


@once_per_rank
def _last() -> deque[weakref.WeakMethod[Callable[[], float]]]:
    """Return the last registered method, which gives the weight of this rank's next gradient."""
    return deque(maxlen=1)


def weight_backward(weight: Callable[[], float]) -> None:
    """Multiply the gradients of every later ``backward()`` of this rank by ``weight()``.

    Args:
        weight: A method; called while its object lives.
    """
    _last().append(weakref.WeakMethod(weight))
    patches.install("gradient weights", _weighting)


def _weighting(backward: Callable[..., None]) -> Callable[..., None]:
    # Tensor.backward() calls this function too.
    @functools.wraps(backward)
    def weighted_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        weight = next((each() for each in _last()), None)
        # Within another backward, as activation checkpointing calls it, gradients are weighted
        # already.
        factor = 1.0 if weight is None or torch._C._current_graph_task_id() != -1 else weight()
        if factor == 1.0:
            backward(tensors, *args, **kwargs)
        else:
            gradients = kwargs.pop("grad_tensors", None) if not args else args[0]
            backward(tensors, _weighted(factor, tensors, gradients), *args[1:], **kwargs)

    return weighted_backward


def _weighted(factor: float, tensors: Any, gradients: Any) -> list[torch.Tensor]:
    """Return the initial gradients of one or several losses, times ``factor``."""
    if isinstance(tensors, torch.Tensor):
        tensors = (tensors,)
    if isinstance(gradients, torch.Tensor):
        gradients = (gradients,)
    given = [None] * len(tensors) if gradients is None else gradients
    return [
        torch.full_like(tensor, factor) if gradient is None else gradient * factor
        for tensor, gradient in zip(tensors, given, strict=True)
    ]
