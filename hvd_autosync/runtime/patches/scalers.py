"""Gradient scalers of mixed precision: which steps they skip, and how their scales change."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from hvd_autosync.util import patches

#: Scaler -> those of our optimizers that it has stepped.
_STEPPED: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def watch_scalers() -> None:
    """Tell the methods of our optimizers, from now on, what their gradient scalers do.

    Where gradients are exchanged, all ranks skip the same steps. Under local steps, a rank that
    skips alone would reach the end of its round later than the others. Error feedback keeps
    gradients that are multiplied by the loss scale of their step.
    """
    patches.install("gradient scalers", _watching_step, _watching_update)


def _watching_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def watched(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(type(optimizer), "_hvd_autosync_method"):
            return step(self, optimizer, *args, **kwargs)
        _STEPPED.setdefault(self, weakref.WeakSet()).add(optimizer)
        result = step(self, optimizer, *args, **kwargs)
        optimizer._hvd_autosync_method.on_skip()
        return result

    return watched


def _watching_update(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _rescaling(self):
            return update(self, *args, **kwargs)

    return watched


@contextlib.contextmanager
def _rescaling(scaler: Any) -> Iterator[None]:
    """Tell methods that keep scaled gradients by what factor the scale changes meanwhile."""
    methods = [each._hvd_autosync_method for each in _STEPPED.get(scaler, ())]
    methods = [method for method in methods if method.keeps_left_out]
    before = scaler.get_scale() if methods else 0.0
    yield
    if before and (factor := scaler.get_scale() / before) != 1:
        for method in methods:
            method.on_rescale(factor)
