"""The strategy optimizer: Horovod's optimizer with our methods of synchronization.

All that a script sees remains Horovod's own code: arguments, checks, ``skip_synchronize``,
``zero_grad``, accumulation. Only what its hooks do, how ``synchronize`` waits, and what ``step``
updates is passed on to a method (:mod:`hvd_autosync.runtime.method`), in the class that is
created for each optimizer (``DistributedOptimizer`` in ``horovod/torch/optimizer.py`` does the
same). No feature is here: this is the adapter between Horovod's class and ours.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from horovod.torch import optimizer as horovod_optimizer
from horovod.torch.mpi_ops import Average

from hvd_autosync.runtime import current
from hvd_autosync.runtime.measure.compute_timer import Waiting
from hvd_autosync.runtime.method import SyncMethod
from hvd_autosync.runtime.optimizer.arguments import check_arguments
from hvd_autosync.runtime.optimizer.checkpoints import keep_in_checkpoints
from hvd_autosync.runtime.optimizer.horovods_exchange import HorovodsExchange
from hvd_autosync.runtime.patches.epochs import SyncPoint
from hvd_autosync.runtime.patches.scalers import has_scaler
from hvd_autosync.runtime.state.group_swap import has_step_hooks, own_class
from hvd_autosync.runtime.sync.synchronizer import Synchronizer
from hvd_autosync.search_space.horovod_settings import is_elastic
from hvd_autosync.search_space.sync_plan import SyncPlan

_horovods_class = horovod_optimizer._DistributedOptimizer


def make_strategy_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    plan: SyncPlan,
    arguments: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """Return a distributed optimizer that synchronizes by ``plan``.

    Args:
        optimizer: The optimizer to wrap.
        named_parameters: As of ``horovod.torch.DistributedOptimizer``.
        plan: The plan.
        arguments: ``compression`` (none), ``backward_passes_per_step``, ``op`` and
            ``gradient_predivide_factor``.

    Raises:
        ConfigurationError: The ranks have different parameters or plans, or the job is elastic, and
            the plan is more than Horovod's own exchange.
        SpaceError: The plan does not fit the parameters or the job.
        ValueError: As of ``horovod.torch.DistributedOptimizer``.
    """
    check_arguments(arguments, plan)
    base = type(optimizer)
    methods = dict(vars(_horovods_class)) | {
        "_register_hooks": _register_hooks,
        "step": _step,
        "synchronize": _synchronize,
        "load_state_dict": _load_state_dict,
        "zero_grad": _zero_grad,
        "add_param_group": _add_param_group,
        "average": _average,
        "_in_step": False,
        "_stepping": False,
        "_reduced": None,
        "_sync": Synchronizer(plan),  # for copies, which synchronize nothing
        "_hvd_autosync_method": property(_method),
        "_hvd_autosync_average": _average,
    }
    created: torch.optim.Optimizer = type(base.__name__, (base,), methods)(
        optimizer.param_groups,
        named_parameters,
        arguments["compression"],
        arguments["backward_passes_per_step"],
        arguments["op"],
        arguments["gradient_predivide_factor"],
    )
    return created


# Horovod's class has no type, and this one is made at run time: ``self`` is Any.


def _register_hooks(self: Any) -> None:
    parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
    self._requires_update.update(parameters)
    if not parameters:
        return
    self._sync = Synchronizer(self._sync.plan)
    elastic = is_elastic(os.environ)
    horovods = HorovodsExchange(self, _horovods_class.synchronize) if elastic else None
    self._sync.attach(self, parameters, averaged=self.op == Average, horovods=horovods)
    keep_in_checkpoints(self)
    reference = weakref.ref(self)
    for parameter in parameters:
        with torch.enable_grad():
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        # As Horovod's, it runs after all hooks of the parameter itself, which may change gradients.
        node.register_hook(partial(_on_gradient, reference, parameter))
        self._grad_accs.append(node)


def _on_gradient(reference: weakref.ref[Any], parameter: torch.Tensor, *_: Any) -> None:
    """A backward pass has added to a gradient; does nothing once its optimizer is gone."""
    self = reference()
    if self is None:
        return
    method, delay = self._sync.method, self._allreduce_delay
    if self._reduced is not None and not _accumulates(self):
        _drop(self)
        if current.losses is not None:
            current.losses.dropped()
    left = delay[parameter]
    if left <= 0:
        method.on_extra_gradient()
        raise AssertionError(
            "Gradients were computed more than backward_passes_per_step times before call to "
            "step(). Increase backward_passes_per_step to accumulate gradients locally."
        )
    method.on_gradient_added(parameter)
    if parameter.grad is None:  # the pass has found none; to read it before is to access it
        return
    delay[parameter] = left - 1
    self._handles[parameter] = (None, None)  # arrived, not sent; Horovod's zero_grad checks it
    if left == 1:
        method.on_gradient_ready(parameter)


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    sync = self._sync
    # Only then the optimizer alone uses the reduced gradients; hooks and closures would too.
    self._in_step = self._should_synchronize and closure is None and not has_step_hooks(self)
    if self._should_synchronize:
        _settle_skipped(self)  # its collectives must not run under a lock
    if closure is not None:
        wholes = [group["params"] for group in self.param_groups]
        closure = partial(_with_all_parameters, self, wholes, closure)
    self._stepping = True
    try:
        result = sync.method.run_step(partial(_horovods_class.step, self, closure))
    finally:
        self._in_step = self._stepping = False
        self._reduced = None
    with Waiting(current.waited):
        sync.end_step()
    return result


def _with_all_parameters(self: Any, wholes: list[Any], closure: Callable[[], Any]) -> Any:
    """Call a closure, which finds in the groups what the script has put there.

    A method may have emptied them for the optimizer's own step.
    """
    now = [group["params"] for group in self.param_groups]
    for group, params in zip(self.param_groups, wholes, strict=True):
        group["params"] = params
    try:
        return closure()
    finally:
        for group, params in zip(self.param_groups, now, strict=True):
            group["params"] = params


def _synchronize(self: Any) -> None:
    fresh = _settle_skipped(self)
    self._sync.method.on_synchronize(in_step=self._in_step, fresh=fresh)
    if not self._in_step:
        # One parameter tells whether the script adds to what was reduced, or has dropped it.
        arrived = (each for each in self._handles if each.grad is not None)
        self._reduced = next(((each, each.grad) for each in arrived), self._reduced)
    delay = self._allreduce_delay
    delay.update(dict.fromkeys(delay, self.backward_passes_per_step))  # without a hash in Python
    self._handles.clear()
    self._synchronized = True


def _settle_skipped(self: Any) -> bool:
    """Count a skipped step if there are gradients of another one; return whether there are."""
    fresh = bool(self._handles) or not self._synchronized
    # Several evaluations by a closure are one step, and so are passes that are added up.
    if fresh and not self._stepping and not _accumulates(self):
        self._sync.method.settle_skipped()
    return fresh


def _accumulates(self: Any) -> bool:
    """Return whether the gradients that the script has synchronized are still there."""
    if self._reduced is None:
        return False
    parameter, gradient = self._reduced
    return parameter.grad is gradient


def _drop(self: Any) -> None:
    self._reduced = None
    self._sync.method.on_drop()


def _method(self: Any) -> SyncMethod:
    method: SyncMethod = self._sync.method
    return method


def _average(self: Any) -> None:
    self._sync.at_sync_point(SyncPoint.SCRIPT)


def _load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
    self._sync.before_loading()
    _horovods_class.load_state_dict(self, *args, **kwargs)


def _zero_grad(self: Any) -> None:
    with self._sync.method.dropping_gradients():
        _horovods_class.zero_grad(self)
    if self._reduced is not None:
        _drop(self)
        if current.losses is not None:
            current.losses.may_skip()
        # A scaler that has seen these gradients changes its scale in update(), which settles.
        if not self._stepping and not has_scaler(self):
            with Waiting(current.waited):
                self._sync.method.settle_skipped()


def _add_param_group(self: Any, param_group: dict[str, Any]) -> None:
    self._sync.method.before_more_parameters()
    own_class(self).add_param_group(self, param_group)
