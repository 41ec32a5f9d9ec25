"""Wraps ``backward``: records the loss of each step and, while profiling, its begin and end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hvd_autosync.runtime import current
from hvd_autosync.runtime.measure.losses import Losses
from hvd_autosync.util import patches

if TYPE_CHECKING:
    from hvd_autosync.runtime.measure.profiler import Profiler

_UNSCALED = "_hvd_autosync_unscaled"


def _no_profiler() -> Profiler | None:
    return None


#: What the last caller gave.

_losses: Losses | None = None
_profiler_now: Callable[[], Profiler | None] = _no_profiler


def watch_backward(
    losses: Losses, profiler_now: Callable[[], Profiler | None] = _no_profiler
) -> None:
    """Watch every backward pass of this process from now on, for the last caller.

    ``Tensor.backward`` calls ``torch.autograd.backward`` too. A loss that was scaled for mixed
    precision is recorded unscaled, so that losses of different runs are comparable. Those of a step
    that a gradient scaler skips are no part of the next one.

    Args:
        losses: Receives the losses.
        profiler_now: Returns the profiler, while there is one.
    """
    global _losses, _profiler_now
    _losses, _profiler_now = losses, profiler_now
    patches.install("losses", _watching, _keep_unscaled, _watching_update)


def _watching(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def watched_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if _losses is not None and isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            _losses.seen(getattr(tensors, _UNSCALED, tensors).detach())
        profiler = _profiler_now()
        with current.noting_failure:
            # Inside another one, as reentrant checkpointing calls it, the outer one is timed.
            if profiler is None or torch._C._current_graph_task_id() != -1:
                backward(tensors, *args, **kwargs)
            else:
                profiler.backward_begins()
                backward(tensors, *args, **kwargs)
                profiler.backward_ends()

    return watched_backward


def _keep_unscaled(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def watched_scale(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if isinstance(scaled, torch.Tensor) and scaled is not outputs:
            setattr(scaled, _UNSCALED, outputs.detach())
        return scaled

    return watched_scale


def _watching_update(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def watched_update(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _losses is not None:
            _losses.may_skip()
        return update(self, *args, **kwargs)

    return watched_update
