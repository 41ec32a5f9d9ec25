"""Wraps ``backward``: records the loss of each step and, while profiling, its begin and end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hvd_autosync.runtime.measure.losses import Losses

if TYPE_CHECKING:
    from hvd_autosync.runtime.measure.profiler import Profiler

_UNSCALED = "_hvd_autosync_unscaled"


def watch_backward(
    losses: Losses, profiler_now: Callable[[], Profiler | None] = lambda: None
) -> None:
    """Watch every backward pass of this process from now on.

    ``Tensor.backward`` calls ``torch.autograd.backward`` too. A loss that was scaled for mixed
    precision is recorded unscaled, so that losses of different runs are comparable.

    Args:
        losses: Receives the losses.
        profiler_now: Returns the profiler, while there is one.
    """
    backward = torch.autograd.backward
    scaler = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)  # since torch 2.3
    scale = scaler.scale

    @functools.wraps(backward)
    def watched_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            losses.seen(getattr(tensors, _UNSCALED, tensors).detach())
        profiler = profiler_now()
        if profiler is None:
            backward(tensors, *args, **kwargs)
        else:
            profiler.backward_begins()
            backward(tensors, *args, **kwargs)
            profiler.backward_ends()

    @functools.wraps(scale)
    def watched_scale(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if isinstance(scaled, torch.Tensor) and scaled is not outputs:
            setattr(scaled, _UNSCALED, outputs.detach())
        return scaled

    vars(torch.autograd)["backward"] = watched_backward
    scaler.scale = watched_scale  # type: ignore[method-assign]
