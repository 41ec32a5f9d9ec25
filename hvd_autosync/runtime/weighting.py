"""Multiplies gradients by what the batch that they are of counts, as ``backward`` makes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

#: What the next gradient counts; the last optimizer's that asked for it.
_weight: Callable[[], float] = lambda: 1.0  # noqa: E731


def weight_backward(weight: Callable[[], float]) -> None:
    """Let every ``backward()`` of this process from now on make gradients times ``weight()``."""
    global _weight
    _weight = weight
    _watch()


@functools.cache
def _watch() -> None:
    # Where Tensor.backward() ends up, too.
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def weighted_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        weight = _weight()
        if weight == 1.0:
            backward(tensors, *args, **kwargs)
        else:
            gradients = kwargs.pop("grad_tensors", None) if not args else args[0]
            backward(tensors, _weighted(weight, tensors, gradients), *args[1:], **kwargs)

    vars(torch.autograd)["backward"] = weighted_backward


def _weighted(weight: float, tensors: Any, gradients: Any) -> list[torch.Tensor]:
    """The gradients to begin with, for a loss or several, times ``weight``."""
    if isinstance(tensors, torch.Tensor):
        tensors, gradients = (tensors,), (gradients,)
    given = [None] * len(tensors) if gradients is None else gradients
    return [
        torch.full_like(tensor, weight) if gradient is None else gradient * weight
        for tensor, gradient in zip(tensors, given, strict=True)
    ]
