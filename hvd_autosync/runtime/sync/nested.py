"""A method of synchronization around another one.

Under a schedule of local steps, or under a protocol, each phase with a barrier is the matter of the
method inside::

    ProtocolPhases(LocalSteps(GradientExchange))
"""

# ruff: noqa: D102 -- a hook is documented once, in SyncMethod.
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from hvd_autosync.runtime.method import SyncMethod
from hvd_autosync.runtime.patches.epochs import SyncPoint

_T = TypeVar("_T")


class Nested(SyncMethod):
    """A method that leaves to another what it does not do itself.

    Args:
        inner: The other method.
    """

    def __init__(self, inner: SyncMethod) -> None:
        self.inner = inner

    @property
    def replicas_in_sync(self) -> bool:
        return self.inner.replicas_in_sync

    @property
    def average_is_exact(self) -> bool:
        return self.inner.average_is_exact

    @property
    def in_round(self) -> bool:
        return self.inner.in_round

    @property
    def near_average(self) -> bool:
        return self.inner.near_average

    @property
    def round_steps(self) -> int:
        return self.inner.round_steps

    def on_gradient_added(self, parameter: torch.nn.Parameter) -> None:
        self.inner.on_gradient_added(parameter)

    def on_gradient_ready(self, parameter: torch.nn.Parameter) -> None:
        self.inner.on_gradient_ready(parameter)

    def on_extra_gradient(self) -> None:
        self.inner.on_extra_gradient()

    def settle_skipped(self) -> None:
        self.inner.settle_skipped()

    def on_synchronize(self, *, in_step: bool, fresh: bool) -> None:
        self.inner.on_synchronize(in_step=in_step, fresh=fresh)

    def run_step(self, step: Callable[[], _T]) -> _T:
        return self.inner.run_step(step)

    def on_step_end(self) -> None:
        self.inner.on_step_end()

    @property
    def keeps_left_out(self) -> bool:
        return self.inner.keeps_left_out

    def on_skip(self) -> None:
        self.inner.on_skip()

    def on_drop(self) -> None:
        self.inner.on_drop()

    def on_rescale(self, factor: float) -> None:
        self.inner.on_rescale(factor)

    def at_sync_point(self, why: SyncPoint) -> None:
        self.inner.at_sync_point(why)

    def average(self) -> None:
        self.inner.average()

    def settle(self) -> None:
        self.inner.settle()

    def dropping_gradients(self) -> AbstractContextManager[None]:
        return self.inner.dropping_gradients()

    def before_more_parameters(self) -> None:
        self.inner.before_more_parameters()

    def before_loading(self) -> None:
        self.inner.before_loading()

    def make_whole(self) -> None:
        self.inner.make_whole()

    def before_sharing(self) -> None:
        self.inner.before_sharing()

    def share(self, root: int) -> None:
        self.inner.share(root)

    def forget_states(self) -> None:
        self.inner.forget_states()

    def whole_states(self) -> dict[int, dict[str, Any]]:
        return self.inner.whole_states()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, entries: dict[str, Any]) -> dict[int, dict[str, Any]] | None:
        return self.inner.load_state_dict(entries)

    def make_exact(self, *, together: bool) -> None:
        self.inner.make_exact(together=together)

    def abandon(self) -> None:
        self.inner.abandon()

    def detach(self) -> dict[str, Any]:
        return self.inner.detach()
