"""Priority order: the step of a layer waits until just before that layer's next forward.

Backward gives the last layers' gradients first, the next forward needs the first layers first. So
the first layers are sent first, and a parameter is stepped when something reaches for it: forward,
``state_dict()``, ``parameters()``, or any other way through its module. The mathematics is that of
an ordinary step, communication hides behind the next forward too (P3, Jayarajan et al. 2019;
ByteScheduler, Peng et al. 2019).

A script that keeps parameters elsewhere, and reads them there between ``step()`` and ``forward()``,
would see some of them a step too old. So the knob is not among the exact ones.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from time import perf_counter
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch import nn

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.buckets import Bucket
from hvd_autosync.runtime.dispatcher import Dispatcher
from hvd_autosync.runtime.substitution import Substitution, own_class, steps_by_element

_HINT = "Leave the knob order out of the strategy, or set it to 'arrival'."

#: Steps in which a script is observed.
_OBSERVED = 2

_LIVE: weakref.WeakSet[Any] = weakref.WeakSet()


class Deferral:
    """The steps of one optimizer that wait.

    It begins once two steps have shown that the script drops gradients after a step
    (``zero_grad()``, as it is by default) and does not change them: they may still travel.

    Args:
        optimizer: Horovod's optimizer, of our class.
        dispatcher: Its dispatcher.
    """

    def __init__(self, optimizer: Any, dispatcher: Dispatcher) -> None:
        self._optimizer = optimizer
        self._dispatcher = dispatcher
        self._possible = steps_by_element(optimizer)
        #: Gradients after the last step, while the script is observed, with their versions.
        self._seen: list[tuple[torch.nn.Parameter, torch.Tensor, int]] = []
        self._steps = 0
        #: Buckets whose parameters are reached through modules only, once that was looked at.
        self._guarded: set[Bucket] | None = None
        #: What waits: parameter -> its bucket; bucket -> its gradients, with their versions.
        self._waiting: dict[torch.nn.Parameter, Bucket] = {}
        self._gradients: dict[Bucket, list[tuple[torch.Tensor, int]]] = {}
        self._options: list[dict[str, Any]] = []
        self._substitution = Substitution(optimizer)
        _LIVE.add(self)
        _settle_at_the_end()

    def arrived(self, parameter: torch.nn.Parameter) -> None:
        """A gradient has been computed; its parameter must have had its step before.

        Raises:
            ConfigurationError: It has not.
        """
        if parameter in self._waiting:
            raise ConfigurationError(
                "a parameter was used in forward without its module, before its step was taken "
                "(order 'priority')", hint=_HINT,
            )  # fmt: skip

    def choose(self) -> Collection[Bucket]:
        """The buckets that may wait in this step; called in each step, before anything is used."""
        self._steps += 1
        if self._steps <= _OBSERVED + 1:
            for parameter, gradient, version in self._seen:
                if parameter.grad is gradient or gradient._version != version:
                    self._possible = False
            self._seen = []
        if not self._possible or self._steps <= _OBSERVED:
            return ()
        if self._guarded is None:
            self._guarded = self._guard()
        return self._guarded

    def begin(self, late: Collection[Bucket]) -> None:
        """The optimizer's step begins, without what is late."""
        for bucket in late:
            self._gradients[bucket] = [(g, g._version) for g in map(_gradient, bucket.parameters)]
            self._waiting.update(dict.fromkeys(bucket.parameters, bucket))
        # The script may change these before the step is taken, as a schedule does.
        self._options = [
            {name: _kept(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        self._substitution.make(lambda whole: () if whole in self._waiting else (whole,))

    def put_back(self) -> None:
        """The optimizer's step is over."""
        self._substitution.undo()
        if 0 < self._steps <= _OBSERVED:
            parameters = [p for bucket in self._dispatcher.buckets for p in bucket.parameters]
            self._seen = [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]

    def settle(self, parameter: torch.nn.Parameter) -> None:
        """Take the step of ``parameter``, if it waits, with all of its bucket."""
        bucket = self._waiting.get(parameter)
        if bucket is not None:
            self._settle(bucket)

    def settle_all(self) -> None:
        """Take all steps that wait."""
        while self._gradients:
            self._settle(next(iter(self._gradients)))

    def _settle(self, bucket: Bucket) -> None:
        gradients = self._gradients.pop(bucket)
        for parameter in bucket.parameters:
            del self._waiting[parameter]
        now = [parameter.grad for parameter in bucket.parameters]
        for parameter, (gradient, version) in zip(bucket.parameters, gradients, strict=True):
            if gradient._version != version:
                raise ConfigurationError(
                    "a gradient was changed in place after step() (order 'priority')", hint=_HINT
                )
            parameter.grad = gradient
        try:
            began = perf_counter()
            self._dispatcher.finish_late(bucket)
            current.waited(perf_counter() - began)
            self._step(set(bucket.parameters))
        finally:
            for parameter, new in zip(bucket.parameters, now, strict=True):
                parameter.grad = new

    def _step(self, parameters: set[torch.nn.Parameter]) -> None:
        """The optimizer's own step for some parameters, under the options of the step due."""
        optimizer = self._optimizer
        groups = optimizer.param_groups
        optimizer.param_groups = [
            {**options, "params": [p for p in group["params"] if p in parameters]}
            for options, group in zip(self._options, groups, strict=False)  # later ones are new
        ]
        try:
            step = own_class(optimizer).step
            # Below the script's hooks, which have run in the step that this is a part of.
            getattr(step, "__wrapped__", step)(optimizer)
        finally:
            optimizer.param_groups = groups

    def _guard(self) -> set[Bucket]:
        """Have modules tell when their parameters are reached for; where that is possible."""
        parameters = {p for b in self._dispatcher.buckets for p in b.parameters}
        modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        owners: dict[torch.nn.Parameter, list[nn.Module]] = {}
        for module in modules:
            for parameter in module.__dict__.get("_parameters", {}).values():
                if parameter in parameters:
                    owners.setdefault(parameter, []).append(module)
        usable = set()
        for parameter, its_modules in owners.items():
            if all(_guardable(module) for module in its_modules):
                usable.add(parameter)
        guarded = {
            bucket for bucket in self._dispatcher.buckets
            if bucket.may_be_late and usable.issuperset(bucket.parameters)
        }  # fmt: skip
        for module in {m for b in guarded for p in b.parameters for m in owners[p]}:
            own = module.__dict__["_parameters"]
            if not isinstance(own, _Guarded):
                own = module.__dict__["_parameters"] = _Guarded(own)
            own.settles.append(self.settle)
            if isinstance(module, nn.RNNBase):  # which keeps its parameters in a list, too
                module.register_forward_pre_hook(_reach_for_all)
        return guarded


@functools.cache
def _settle_at_the_end() -> None:
    """Have ``hvd.join()`` and ``hvd.shutdown()`` wait for what is under way: Horovod drops it."""

    def settling(function: Callable[..., Any]) -> Callable[..., Any]:
        def settle_first(*args: Any) -> Any:
            for deferral in list(_LIVE):
                # Another rank may be gone; and an end must not fail for what comes before it.
                with contextlib.suppress(mpi_ops.HorovodInternalError, ConfigurationError):
                    deferral.settle_all()
            return function(*args)

        return settle_first

    # Below the names by which scripts may have imported them already.
    library, own_library = mpi_ops.mpi_lib, mpi_ops._basics.MPI_LIB_CTYPES
    library.horovod_torch_join = settling(library.horovod_torch_join)
    own_library.horovod_shutdown = settling(own_library.horovod_shutdown)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "buckets fill in what is missing"
    return parameter.grad


def _kept(value: Any) -> Any:
    """A value of now: schedules change a learning rate that is a tensor in place."""
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _guardable(module: nn.Module) -> bool:
    """Whether Python sees who reads a module's parameters; compiled ones read them elsewhere."""
    known = type(module.__dict__["_parameters"]) in (dict, OrderedDict, _Guarded)
    return known and module._compiled_call_impl is None


def _reach_for_all(module: nn.Module, _: Any) -> None:
    list(module.parameters(recurse=False))


class _Guarded(dict[str, Any]):
    """A module's parameters; whoever reaches for one is given it up to date.

    Attributes:
        settles: Take the step of a parameter, if it waits; one for each optimizer.
    """

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.settles: list[Callable[[Any], None]] = []

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self._settle(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def values(self) -> Any:
        self._settle_all()
        return super().values()

    def items(self) -> Any:
        self._settle_all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce__(self) -> Any:
        # Copied and saved models are no models of this optimizer.
        return dict, (self.copy(),)

    def _settle(self, parameter: Any) -> None:
        for settle in self.settles:
            settle(parameter)

    def _settle_all(self) -> None:
        for parameter in super().values():
            self._settle(parameter)
