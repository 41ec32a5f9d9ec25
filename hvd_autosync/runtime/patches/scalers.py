"""Gradient scalers of mixed precision: which steps they skip, and how their scales change."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_autosync.runtime.collectives.operations import Sum, allreduce, rank, size
from hvd_autosync.util import patches


@dataclass(eq=False)
class _Watched:
    """What is known of a gradient scaler.

    Attributes:
        optimizers: Those of ours that it steps, in the order of their first steps, which is the
            same on all ranks.
        in_step: Whether it has begun a step, and ``update()`` has not followed.
        agreed: Its scale and its steps since a change, from the next ``update()`` on.
    """

    optimizers: weakref.WeakKeyDictionary[Any, None] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    in_step: bool = False
    agreed: tuple[float, int] | None = None


_WATCHED: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()


def watch_scalers() -> None:
    """Tell the methods of our optimizers, from now on, what their gradient scalers do.

    Where gradients are exchanged, all ranks skip the same steps. Under local steps, a rank that
    skips alone would reach the end of its round later than the others, and has another loss scale
    from then on. Error feedback keeps gradients that are multiplied by the loss scale of their
    step.
    """
    patches.install("gradient scalers", _watching_step, _watching_update)


def has_scaler(optimizer: Any) -> bool:
    """Return whether a gradient scaler steps an optimizer of ours."""
    return any(optimizer in own.optimizers for own in _WATCHED.values())


def equalize_loss_scale(optimizer: Any, name: str) -> None:
    """Set the loss scale of an optimizer to the lowest of all ranks; a collective.

    Each rank has adapted its own while gradients were not exchanged. Sums of gradients that are
    scaled differently would be another step on each rank. In a step, the scale is set after the
    ``update()`` of that step, whatever that has made of it: gradients that have overflowed on one
    rank may overflow again, then on all.

    Args:
        optimizer: The optimizer.
        name: Name of the operation.
    """
    scaler, own = next(
        ((each, own) for each, own in _WATCHED.items() if optimizer in own.optimizers),
        (None, _Watched()),
    )
    scales = torch.zeros(size(), 2, dtype=torch.float64, device="cpu")
    if scaler is not None:
        state = scaler.state_dict()
        own_scale = [state["scale"], state["_growth_tracker"]]
        scales[rank()] = torch.tensor(own_scale, dtype=torch.float64, device="cpu")
    scales = allreduce(scales, op=Sum, name=f"{name}.loss_scale")
    known = scales[scales[:, 0] > 0]  # those of other ranks have no scaler, or are in join()
    if scaler is None or not len(known):
        return
    scale, steps = known.min(0).values.tolist()
    own.agreed = (scale, int(steps))
    if not own.in_step:
        with _rescaling(scaler):
            _set_agreed(scaler, own)


def _set_agreed(scaler: Any, own: _Watched) -> None:
    if own.agreed is not None:
        scale, steps = own.agreed
        own.agreed = None
        state = scaler.state_dict()
        scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": steps})


def _watching_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def watched(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(type(optimizer), "_hvd_autosync_method"):
            return step(self, optimizer, *args, **kwargs)
        if self.is_enabled():
            own = _WATCHED.setdefault(self, _Watched())
            if optimizer not in own.optimizers:
                for each in _WATCHED.values():
                    each.optimizers.pop(optimizer, None)
                own.optimizers[optimizer] = None
            own.in_step = True
        result = step(self, optimizer, *args, **kwargs)
        optimizer._hvd_autosync_method.on_skip()
        return result

    return watched


def _watching_update(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = _WATCHED.get(self)
        if own is None:
            return update(self, *args, **kwargs)
        # A step that the script has skipped itself ends here, as the others do in their own: later
        # its end could change the scale between backward() and unscale_().
        own.in_step = True
        for optimizer in list(own.optimizers):
            optimizer._hvd_autosync_method.settle_skipped()
        with _rescaling(self):
            result = update(self, *args, **kwargs)
            own.in_step = False
            _set_agreed(self, own)
        return result

    return watched


@contextlib.contextmanager
def _rescaling(scaler: Any) -> Iterator[None]:
    """Tell methods that keep scaled gradients by what factor the scale changes meanwhile."""
    methods = [each._hvd_autosync_method for each in _WATCHED[scaler].optimizers]
    methods = [method for method in methods if method.keeps_left_out]
    before = scaler.get_scale() if methods else 0.0
    yield
    if before and (factor := scaler.get_scale() / before) != 1:
        for method in methods:
            method.on_rescale(factor)
