"""The strategy optimizer: Horovod's optimizer with our dispatcher in place of its own exchanges.

All that a script sees remains Horovod's own code: arguments, checks, ``skip_synchronize``,
``zero_grad``, accumulation. Only what its hooks do, how ``synchronize`` waits, and which parameters
``step`` updates is replaced, in the class that is created for each optimizer
(``DistributedOptimizer`` in ``horovod/torch/optimizer.py`` does the same).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from horovod.torch import optimizer as horovod_optimizer
from horovod.torch.mpi_ops import Average, rank, rocm_built, size
from torch.optim import optimizer as torch_optimizer

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.agreement import agree_parameters
from hvd_autosync.runtime.collectives.messaging import check_messaging
from hvd_autosync.runtime.exchange.exchanges import Scaling
from hvd_autosync.runtime.exchange.gradient_exchange import GradientExchange, check_plan
from hvd_autosync.runtime.guard.guard import Guard
from hvd_autosync.runtime.guard.handler import LossGuardHandler
from hvd_autosync.runtime.measure.losses import Losses
from hvd_autosync.runtime.optimizer.checkpoints import keep_in_checkpoints
from hvd_autosync.runtime.patches.backward import watch_backward
from hvd_autosync.runtime.patches.scalers import watch_scalers
from hvd_autosync.runtime.state.group_swap import ParameterGroupSwap, own_class
from hvd_autosync.runtime.sync.averaging import Averaging
from hvd_autosync.runtime.sync.local_steps import LocalSteps
from hvd_autosync.runtime.sync.phases import ProtocolPhases
from hvd_autosync.runtime.sync.suitability import (
    check_balance,
    check_optimizer,
    check_owned,
    refuse_more_parameters,
)
from hvd_autosync.search_space.exchange_plan import (
    PARAMETER_CLASSES,
    Classes,
    ClassPlan,
    ExchangePlan,
    class_of,
)
from hvd_autosync.search_space.horovod_settings import ELASTIC_VARIABLE
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.search_space.sync_plan import SyncPlan

_horovods_class = horovod_optimizer._DistributedOptimizer
#: Numbers of the optimizers of this process, in order of creation.
_NUMBERS = itertools.count()
#: The guards in order of creation, which is the same on all ranks.
_GUARDS: list[weakref.ref[Guard]] = []
#: What marks a sent gradient for Horovod's methods.
_SENT = (0, None)


def make_strategy_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    plan: SyncPlan,
    arguments: dict[str, Any],
) -> torch.optim.Optimizer:
    """A distributed optimizer that synchronizes by ``plan``.

    Args:
        optimizer: The optimizer to wrap.
        named_parameters: As of ``horovod.torch.DistributedOptimizer``.
        plan: The plan.
        arguments: ``compression`` (none), ``backward_passes_per_step``, ``op`` and
            ``gradient_predivide_factor``.

    Raises:
        ConfigurationError: The ranks have different parameters or plans, or the job is elastic.
        SpaceError: The plan does not fit the parameters or the job.
        ValueError: As of ``horovod.torch.DistributedOptimizer``.
    """
    _check(arguments)
    methods: dict[str, Any] = dict(vars(_horovods_class)) | {
        "_register_hooks": _register_hooks,
        "step": _step,
        "synchronize": _synchronize,
        "load_state_dict": _load_state_dict,
        "zero_grad": _zero_grad,
        "add_param_group": _add_param_group,
        "average": _average,
        "_settle_steps": _settle,
    }
    base = type(optimizer)
    methods["_hvd_autosync_plan"] = plan
    methods |= dict.fromkeys(("_exchange", "_local", "_phases", "_guard"))
    methods |= {"_in_step": False, "_exact": False, "_guard_handler": None}
    methods["_hvd_autosync_after_skip"] = _after_skip
    cls = type(base.__name__, (base,), methods)
    created: torch.optim.Optimizer = cls(
        optimizer.param_groups,
        named_parameters,
        arguments["compression"],
        arguments["backward_passes_per_step"],
        arguments["op"],
        arguments["gradient_predivide_factor"],
    )
    return created


def _check(arguments: dict[str, Any]) -> None:
    """Make the checks of ``DistributedOptimizer`` itself, whose class is created here."""
    if os.environ.get(ELASTIC_VARIABLE) == "1":
        raise ConfigurationError(
            "an elastic job cannot run under a strategy with exchange, schedule or protocol knobs",
            hint="Run it with a fixed number of ranks, or without a strategy.",
        )
    if arguments["gradient_predivide_factor"] != 1.0:
        if rocm_built():
            raise ValueError("gradient_predivide_factor not supported yet with ROCm")
        if arguments["op"] != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
    if arguments["backward_passes_per_step"] <= 0:
        raise ValueError("backward_passes_per_step must be > 0")


def _register_hooks(self: Any) -> None:
    whole: SyncPlan = type(self)._hvd_autosync_plan
    plan, schedule, protocol = whole.effective_exchange, whole.schedule, whole.protocol
    parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
    self._requires_update.update(parameters)
    if not parameters:
        return
    names = _named(self, parameters, whole.classes)
    first = names[parameters[0]][0]
    agree_parameters(
        [
            (
                "the plan",
                f"{plan} with {self.op}, {self.gradient_predivide_factor}, {schedule}, {protocol}",
            ),
            *(
                (name, f"{tuple(parameter.shape)} {parameter.dtype} {parameter_class}")
                for parameter, (name, parameter_class) in names.items()
            ),
        ]
    )
    _warn_of_empty_classes(plan, {parameter_class for _, parameter_class in names.values()})
    self._exchange = GradientExchange(first, self, plan, names, _scaling(self))
    self.register_state_dict_pre_hook(_settle)
    self._guard_handler = LossGuardHandler(self)
    # Several optimizers may have first parameters of the same name.
    own_name = f"{next(_NUMBERS)}.{first}"
    if schedule is not None:
        watch_scalers()
        averaging = Averaging(own_name, names, plan)
        self._local = LocalSteps(own_name, self, schedule, averaging)
    if protocol is not None:
        watch_scalers()
        self._phases = _make_phases(self, own_name, protocol)
    if whole.lossy and current.run is None:
        if current.losses is None:
            current.losses = Losses()
            watch_backward(current.losses)
        self._guard = _new_guard(own_name)
    keep_in_checkpoints(self)
    reference = weakref.ref(self)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(_hook(reference))


def _new_guard(name: str) -> Guard:
    """A guard with predicted losses, unless there are several guards.

    The prediction is of one optimizer's losses, and it is unknown of which.
    """
    guard = Guard(name, None if _GUARDS else current.loss_prediction)
    if len(_GUARDS) == 1 and (first := _GUARDS[0]()) is not None:
        first.forget_prediction()
    _GUARDS.append(weakref.ref(guard))
    return guard


def _make_phases(self: Any, name: str, protocol: Protocol) -> ProtocolPhases:
    check_optimizer(self)
    guard, local = self._guard_handler, self._local
    check_balance(
        protocol, local_steps=local is not None, passes_per_step=self.backward_passes_per_step
    )
    check_messaging(name)
    return ProtocolPhases(name, self, protocol, guard, local, summed=self.op != Average)


def switch_plan(optimizer: Any, plan: ExchangePlan, classes: Classes) -> None:
    """Exchange gradients by another plan from the next step on; a collective between two steps.

    Error feedback of buckets that both plans have goes on; that of others is dropped.

    Args:
        optimizer: A strategy optimizer whose ranks make every step together.
        plan: The plan.
        classes: Which parameters are in which class.

    Raises:
        ConfigurationError: The optimizer has local steps or a protocol, a step has begun, or the
            plan is lossy and there is no loss guard.
        SpaceError: The plan does not fit the parameters or the job.
    """
    if optimizer._local is not None or optimizer._phases is not None:
        raise ConfigurationError(
            "the exchange of gradients cannot change in a training with local steps or a protocol",
            hint="Change it in a training whose ranks make every step together.",
        )
    if plan.lossy and optimizer._guard is None and not optimizer._exact and current.run is None:
        raise ConfigurationError(
            "a training without codecs has no loss guard, and cannot change to a plan with codecs",
            hint="Begin it with a codec, or change to an exact plan.",
        )
    before = optimizer._exchange
    names = _named(optimizer, list(before.parameters), classes)
    check_plan(plan, names)
    states = before.dispatcher.codec_states()
    before.detach()
    optimizer._exchange = GradientExchange(before.name, optimizer, plan, names, _scaling(optimizer))
    optimizer._exchange.dispatcher.load_codec_states(states)
    if optimizer._exact:
        optimizer._exchange.dispatcher.drop_codecs()


def _named(
    self: Any, parameters: Iterable[torch.nn.Parameter], classes: Classes
) -> dict[torch.nn.Parameter, tuple[str, str]]:
    """Name and class of each parameter."""
    names = {parameter: str(self._parameter_names[parameter]) for parameter in parameters}
    return {parameter: (name, class_of(name, classes)) for parameter, name in names.items()}


def _scaling(self: Any) -> Scaling:
    factor = self.gradient_predivide_factor
    return Scaling(1 / factor, factor / size()) if self.op == Average else Scaling()


def _warn_of_empty_classes(plan: ExchangePlan, present: set[str]) -> None:
    for parameter_class in PARAMETER_CLASSES:
        special = plan.of(parameter_class) != ClassPlan()
        if special and parameter_class not in present and rank() == 0:
            warnings.warn(
                f"no parameter of this optimizer is of class {parameter_class}, for which the "
                "strategy has knobs; check that its classes have names of named_parameters",
                stacklevel=2,
            )


def _hook(reference: weakref.ref[Any]) -> Callable[[torch.nn.Parameter], None]:
    """Returns the hook for a complete gradient, which acts as long as its optimizer lives."""

    def arrived(parameter: torch.nn.Parameter) -> None:
        self = reference()
        if self is None:
            return
        delay = self._allreduce_delay
        if delay[parameter] <= 0:
            if self._phases is not None and self._phases.balanced:
                raise ConfigurationError(
                    "stragglers='balance': the script calls backward() more often than before, "
                    "because its batch has grown",
                    hint="Leave the knob stragglers at none for a script that splits its batches.",
                )
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        delay[parameter] -= 1
        self._exchange.computed(parameter)
        # Horovod's zero_grad checks these.
        self._handles[parameter] = _SENT
        if delay[parameter] > 0:
            return
        if self._phases is not None:
            self._phases.arrived(parameter)
            if self._phases.running:
                return
        if self._local is not None and self._local.running:
            self._local.gradient_arrived()
        else:
            self._exchange.arrived(parameter)

    return arrived


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    # Only then the optimizer alone uses the reduced gradients; hooks and closures would too.
    self._in_step = self._should_synchronize and closure is None and not _has_hooks(self)
    by_owners = False
    group_swap = ParameterGroupSwap(self)
    if self._should_synchronize:
        _settle_owed(self)  # its collectives must not run under the lock
    apart = self._local is not None and self._local.running
    if self._phases is not None and self._phases.running:
        check_owned(self)
        group_swap.make(lambda _: ())  # parameter servers make the step
    try:
        with self._local.states.lock if apart else contextlib.nullcontext():
            result = _horovods_class.step(self, closure)
    finally:
        self._in_step = False
        by_others = group_swap.made
        group_swap.undo()
        if self._exchange is not None:
            by_owners = self._exchange.step_ended()
    began = perf_counter()
    if by_owners:
        self._exchange.share_parameters()
    if by_others:
        self._phases.exchange()
        self._phases.compute_timer.waited(perf_counter() - began)
    _after_step(self)
    current.waited(perf_counter() - began)
    return result


def _after_step(self: Any) -> None:
    if self._guard_handler is None:
        return  # no hooks were registered: a single rank, or nothing to train
    if self._local is not None and self._phases is not None and self._local.running:
        self._phases.await_device()
    began = perf_counter()
    if self._local is not None:
        self._local.stepped()
    if self._phases is not None:
        self._phases.compute_timer.waited(perf_counter() - began)
        self._phases.stepped()
    if self._phases is None or not self._phases.running:
        self._guard_handler.stepped()


def _after_skip(self: Any) -> None:
    if self._local is not None and self._local.running and self._local.owed:
        _after_step(self)


def _settle_owed(self: Any) -> None:
    """Count a skipped step now that there are gradients of another; a collective.

    Ranks may be in another phase after it.
    """
    if self._local is not None and self._local.running and _has_new_gradients(self):
        self._local.settle()


def _average(self: Any) -> None:
    current.average(self)


def _has_new_gradients(self: Any) -> bool:
    """Whether there are gradients that were not synchronized yet."""
    return bool(self._handles) or not self._synchronized


def _has_hooks(self: Any) -> bool:
    """Whether code of the script's runs right before or after the optimizer's own step."""
    return bool(
        self._optimizer_step_pre_hooks
        or self._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def _synchronize(self: Any) -> None:
    if self._phases is not None and not self._in_step:
        self._phases.script_uses_gradients()
    _settle_owed(self)
    if self._phases is not None and self._phases.running:
        pass  # gradients are not reduced
    elif self._local is not None and self._local.running:
        if _has_new_gradients(self):
            self._local.synchronized()
    elif self._requires_update and size() > 1:
        if self._phases is not None:
            self._phases.await_device()
        began = perf_counter()
        self._exchange.synchronize(in_step=self._in_step)
        if self._phases is not None:
            self._phases.compute_timer.waited(perf_counter() - began)
            self._phases.rescale([p.grad for p in self._requires_update if p.grad is not None])
    for parameter in self._allreduce_delay:
        self._allreduce_delay[parameter] = self.backward_passes_per_step
    self._handles.clear()
    self._synchronized = True


def _load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
    if self._phases is not None and self._phases.running:
        raise ConfigurationError(
            "cannot load_state_dict() of the optimizer while its states are with their owners, "
            "during steps without a barrier",
            hint="Load a checkpoint before the training, or leave the protocol knobs out of the "
            "strategy.",
        )
    if self._requires_update and size() > 1:
        # All ranks must finish what some have begun.
        self._exchange.before_loading()
    _horovods_class.load_state_dict(self, *args, **kwargs)


def _zero_grad(self: Any) -> None:
    exchange = self._exchange
    with exchange.dropping_gradients() if exchange is not None else contextlib.nullcontext():
        _horovods_class.zero_grad(self)


def _add_param_group(self: Any, param_group: dict[str, Any]) -> None:
    if self._phases is not None and self._phases.unsynchronized:
        refuse_more_parameters()
    own_class(self).add_param_group(self, param_group)


def _settle(self: Any) -> None:
    if self._exchange is not None:
        self._exchange.settle()
