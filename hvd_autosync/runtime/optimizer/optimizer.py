"""``DistributedOptimizer``: Horovod's optimizer with this job's strategy and our timing.

Horovod creates a class per call and calls ``super(self.__class__, self)`` in it, so a subclass of
ours would recurse forever. Our methods are therefore set on that very class. They are functions of
this module and find the trial through :mod:`hvd_autosync.runtime.current`, so an optimizer remains
as picklable as Horovod's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from horovod.torch import functions as horovod_functions
from horovod.torch import optimizer as horovod_optimizer

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.operations import broadcast_
from hvd_autosync.runtime.collectives.warn_once import warn_on_rank_0
from hvd_autosync.runtime.measure.compute_timer import Waiting
from hvd_autosync.runtime.optimizer.arguments import by_adasum, owned_knobs
from hvd_autosync.search_space.sync_plan import SyncPlan

_horovods_own = horovod_optimizer.DistributedOptimizer
_SIGNATURE = signature(_horovods_own)
_horovods_broadcast = horovod_functions.broadcast_optimizer_state


# broadcast_optimizer_state compares the module with that of the optimizer's class, to tell whether
# step() would reduce gradients (horovod/torch/functions.py).
@wraps(_horovods_own, assigned=("__module__",))
def DistributedOptimizer(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
    """Return an optimizer that reduces gradients across ranks before it applies them.

    Arguments, errors and behavior are those of ``horovod.torch.DistributedOptimizer``
    (``horovod/torch/optimizer.py``). Gradients are exchanged as the job's strategy says, unless the
    script's arguments say how.

    Returns:
        An instance of a class that inherits from the class of ``optimizer``.
    """
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    arguments = call.arguments
    optimizer, named_parameters = arguments.pop("optimizer"), arguments.pop("named_parameters")
    return distribute(
        optimizer, named_parameters, arguments, current.sync_plan, owned_knobs(arguments)
    )


def distribute(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    arguments: dict[str, Any],
    plan: SyncPlan | None,
    owned: frozenset[str],
) -> torch.optim.Optimizer:
    """Wrap ``optimizer``, and time it in a trial.

    Args:
        optimizer: The optimizer to wrap.
        named_parameters: Its parameters with their names.
        arguments: All other arguments of ``horovod.torch.DistributedOptimizer``.
        plan: How ranks synchronize; ``None``: as by Horovod's own optimizer, which is also the case
            if the arguments decide it.
        owned: Knobs fixed by the script: by the arguments, or all of a plan that it has chosen.
    """
    distributed: torch.optim.Optimizer
    decided = owned_knobs(arguments)
    if plan is not None and "local_steps" in decided:
        plan = plan.without_local_steps()
    if plan is None or "buckets" in decided:
        if plan is not None:
            warn_on_rank_0(
                "the arguments of the script's DistributedOptimizer say how gradients are "
                "exchanged; the strategy's exchanges, local steps and protocols are not used"
            )
        distributed = _horovods_own(optimizer, named_parameters, **arguments)
    else:
        from hvd_autosync.runtime.optimizer.strategy_optimizer import make_strategy_optimizer

        named = None if named_parameters is None else list(named_parameters)
        try:
            distributed = make_strategy_optimizer(optimizer, named, plan, arguments)
        except ConfigurationError as error:  # on all ranks
            if current.live is None or owned != decided:
                raise
            # Horovod's own does with less, such as parameters in another order on each rank.
            distributed = _horovods_own(optimizer, named, **arguments)
            current.live.own_because = error.message
        if owned != decided and (sync := vars(distributed).get("_sync")) is not None:
            sync.chosen = True
    if any(each is not None for each in _watchers()):
        _add_timing(type(distributed), adasum=by_adasum(arguments))
    for each in (current.run, current.live, current.run_summary):
        if each is not None:
            each.optimizer_created(distributed, owned)
    return distributed


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """``horovod.torch.broadcast_optimizer_state``, also for ranks with states of their own.

    Horovod writes into what ``state_dict()`` returns (``horovod/torch/functions.py``), so the state
    itself must be there.

    Args:
        optimizer: As in Horovod.
        root_rank: As in Horovod.
        model: As in Horovod.
    """
    sync = getattr(optimizer, "_sync", None)
    if sync is None:
        _horovods_broadcast(optimizer, root_rank, model)
        return
    sync.method.before_sharing()
    _horovods_broadcast(optimizer, root_rank, model)
    sync.method.share(root_rank)
    exact = torch.tensor([int(sync.exact)], device="cpu")
    broadcast_(exact, root_rank, name="hvd_autosync.exact")
    if exact.item():
        from hvd_autosync.runtime.guard.fallback import fall_back_to_exact

        fall_back_to_exact(optimizer)


def _add_timing(cls: Any, *, adasum: bool) -> None:
    """Put our methods before those of a class that Horovod created."""
    cls._horovod_step, cls._horovod_zero_grad = cls.step, cls.zero_grad
    cls.zero_grad = noted_zero_grad
    if adasum:
        cls.step = timed_adasum_step
    else:
        cls.step = timed_step
        cls._horovod_synchronize = cls.synchronize
        cls.synchronize = timed_synchronize


def timed_step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Horovod's ``step``, then the end of a training step."""
    with current.noting_failure:
        result = type(self)._horovod_step(self, closure)
    _stepped(self)
    return result


def timed_synchronize(self: Any) -> None:
    """Horovod's ``synchronize``, timed as waiting."""
    with Waiting(current.waited), current.noting_failure:
        type(self)._horovod_synchronize(self)


def noted_zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
    """Horovod's ``zero_grad``, perhaps of gradients that the script has refused to step."""
    type(self)._horovod_zero_grad(self, *args, **kwargs)
    if current.losses is not None and getattr(self, "_synchronized", False):
        current.losses.may_skip()


def timed_adasum_step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """:func:`timed_step` for Adasum, which waits inside ``step``."""
    with Waiting(current.waited):
        result = type(self)._horovod_step(self, closure)
    _stepped(self)
    return result


def _watchers() -> tuple[Any, ...]:
    """Return what is told about every step, where it is there."""
    return current.run, current.live, current.watch, current.run_summary


def _stepped(optimizer: Any) -> None:
    if current.losses is not None:
        current.losses.stepped(optimizer)
    for watcher in _watchers():
        if watcher is not None:
            watcher.optimizer_stepped(optimizer)


for _step in (timed_step, timed_adasum_step):
    # Horovod's step is hooked already; torch must not run the step hooks again.
    _step.__dict__["hooked"] = True
