"""Priority order: the step of a layer waits until just before that layer's next forward.

Backward gives the last layers' gradients first, the next forward needs the first layers first. So
the first layers are sent first, and a parameter is stepped when something reaches for it: forward,
``state_dict()``, or whatever else Python does with it
(:mod:`hvd_autosync.runtime.exchange.reaching`). The mathematics is that of an ordinary step,
communication hides behind the next forward too (P3, Jayarajan et al. 2019; ByteScheduler, Peng et
al. 2019).

Whoever reads a parameter unseen, as compiled code does, would see it a step too old. So the first
steps are rehearsed: they are taken in time, while it is watched whether every parameter is reached
for before its gradient comes. What is not, never waits, and nothing does once code is compiled.
Ranks need not agree on what waits: the same is sent in any case.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Collection, Iterator
from time import perf_counter
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch import nn

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.warn_once import warn_on_rank_0
from hvd_autosync.runtime.exchange.buckets import Bucket
from hvd_autosync.runtime.exchange.compiling import COMPILED, anything_compiled, before_compiling
from hvd_autosync.runtime.exchange.dispatcher import Dispatcher
from hvd_autosync.runtime.exchange.reaching import (
    Memory,
    marked_class,
    unwatch_modules,
    watch_modules,
)
from hvd_autosync.runtime.state.group_swap import ParameterGroupSwap, own_class, steps_by_element

_HINT = "Leave the knob order out of the strategy, or set it to 'arrival'."

#: Steps in which gradients are observed, and the last step that is taken in time.
_OBSERVED, _REHEARSED = 2, 3

_LIVE: weakref.WeakSet[Any] = weakref.WeakSet()


class DeferredUpdate:
    """The steps of one optimizer that wait.

    It begins once two steps have shown that the script drops gradients after a step
    (``zero_grad()``, as it is by default) and does not change them, for they may still travel; and
    two rehearsals, who reaches for which parameter.

    Args:
        optimizer: Horovod's optimizer, of our class.
        dispatcher: Its dispatcher.
    """

    def __init__(self, optimizer: Any, dispatcher: Dispatcher) -> None:
        self._optimizer = optimizer
        self._dispatcher = dispatcher
        self._possible = True
        #: Gradients after the last step, while the script is observed, with their versions.
        self._seen: list[tuple[nn.Parameter, torch.Tensor, int]] = []
        self._steps = 0
        #: Buckets whose steps may wait, as far as is known, with their parameters' memory.
        self._deferrable: dict[Bucket, list[Memory]] = {}
        #: What waits: parameter -> its bucket; bucket -> its gradients, with their versions.
        self._waiting: dict[nn.Parameter, Bucket] = {}
        self._gradients: dict[Bucket, list[tuple[torch.Tensor, int]]] = {}
        self._options: list[dict[str, Any]] = []
        self._group_swap = ParameterGroupSwap(optimizer)
        #: The class of parameters that nobody has reached for since the last step, and these.
        self._class = marked_class(self.settle)
        self._marked: set[nn.Parameter] = set()
        self._warned: set[str] = set()
        _LIVE.add(self)
        _settle_at_the_end()
        before_compiling(_stop_all)
        if not steps_by_element(optimizer):
            self.stop(f"{own_class(optimizer).__name__} steps all parameters together")
        elif anything_compiled():
            self.stop(COMPILED)

    @property
    def possible(self) -> bool:
        """Whether steps may wait, now or later."""
        return self._possible

    def stop(self, why: str) -> None:
        """Take what waits, and every step in time from now on.

        Args:
            why: For rank 0 to say.
        """
        self.settle_all()
        self._possible = False
        self._deferrable = {}
        warn_on_rank_0(f"order 'priority': steps do not wait for the next forward: {why}")

    def arrived(self, parameter: nn.Parameter) -> None:
        """A gradient has been computed; its parameter must have had its step before.

        Raises:
            ConfigurationError: It has not.
        """
        if parameter in self._waiting:
            raise ConfigurationError(
                "a parameter was read where Python does not see it, before its step was taken "
                "(order 'priority')",
                hint=_HINT,
            )
        if parameter in self._marked:
            self._unmark(parameter)
            self._drop({parameter}, "used where Python does not see it")

    def choose(self) -> Collection[Bucket]:
        """The buckets that may wait in this step; called in each step, before anything is used."""
        self._steps += 1
        for parameter, gradient, version in self._seen:
            if parameter.grad is gradient or gradient._version != version:
                self.stop("the script keeps or changes gradients after step()")
                break
        self._seen = []
        if self._steps <= _REHEARSED:
            return ()
        shared = {
            b for b, memories in self._deferrable.items() if any(m.shared() for m in memories)
        }
        if shared:
            self._warn(sum(len(b.parameters) for b in shared), "also part of other tensors")
        return self._deferrable.keys() - shared

    def begin(self, deferred: Collection[Bucket]) -> None:
        """The optimizer's step begins, without what is deferred."""
        for bucket in deferred:
            self._gradients[bucket] = [(g, g._version) for g in map(_gradient, bucket.parameters)]
            self._waiting.update(dict.fromkeys(bucket.parameters, bucket))
        # The script may change these before the step is taken, as a schedule does.
        self._options = [
            {name: _kept(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        self._group_swap.make(lambda whole: () if whole in self._waiting else (whole,))
        self._mark(self._waiting)

    def put_back(self) -> None:
        """The optimizer's step is over."""
        self._group_swap.undo()
        if not self._possible or self._steps > _REHEARSED:
            return
        if 0 < self._steps <= _OBSERVED:
            parameters = [p for bucket in self._dispatcher.buckets for p in bucket.parameters]
            self._seen = [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]
        if self._steps == _OBSERVED and not self._deferrable:
            self._watch()
        if self._steps >= _OBSERVED:
            self._mark({p for bucket in self._deferrable for p in bucket.parameters})

    @contextlib.contextmanager
    def dropping_gradients(self) -> Iterator[None]:
        """Meanwhile gradients are dropped, which needs no step to be taken."""
        for parameter in self._marked:
            parameter.__class__ = nn.Parameter
        try:
            yield
        finally:
            for parameter in self._marked:
                parameter.__class__ = self._class

    def settle(self, parameter: nn.Parameter) -> None:
        """Take the step of ``parameter``, if it waits, with all of its bucket."""
        bucket = self._waiting.get(parameter)
        if bucket is not None:
            self._settle(bucket)
        elif parameter in self._marked:
            self._unmark(parameter)

    def settle_all(self) -> None:
        """Take all steps that wait."""
        while self._gradients:
            self._settle(next(iter(self._gradients)))
        for parameter in list(self._marked):
            self._unmark(parameter)

    def _mark(self, parameters: Collection[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.__class__ = self._class
        self._marked.update(parameters)

    def _unmark(self, parameter: nn.Parameter) -> None:
        parameter.__class__ = nn.Parameter
        self._marked.discard(parameter)

    def _watch(self) -> None:
        """Have whoever reaches for parameters seen, where that is possible."""
        buckets = [b for b in self._dispatcher.buckets if b.deferrable]
        parameters = {p for b in buckets for p in b.parameters}
        plain = {p for p in parameters if type(p) is nn.Parameter}
        self._deferrable = {b: [Memory(p) for p in b.parameters] for b in buckets}
        self._drop(parameters - watch_modules(plain, self.settle), "not in modules of Python's")

    def _drop(self, parameters: set[nn.Parameter], why: str) -> None:
        """Never let the steps of some parameters wait, nor of what travels with them."""
        dropped = {b for b in self._deferrable if not parameters.isdisjoint(b.parameters)}
        self._deferrable = {
            b: memories for b, memories in self._deferrable.items() if b not in dropped
        }
        self._warn(sum(len(b.parameters) for b in dropped), why)

    def _warn(self, count: int, why: str) -> None:
        if count and why not in self._warned:
            self._warned.add(why)
            warn_on_rank_0(
                f"order 'priority': steps of {count} or more parameters do not wait for the next "
                f"forward: they are {why}"
            )

    def _settle(self, bucket: Bucket) -> None:
        gradients = self._gradients.pop(bucket)
        for parameter in bucket.parameters:
            del self._waiting[parameter]
            self._unmark(parameter)
        now = [parameter.grad for parameter in bucket.parameters]
        for parameter, (gradient, version) in zip(bucket.parameters, gradients, strict=True):
            if gradient._version != version:
                raise ConfigurationError(
                    "a gradient was changed in place after step() (order 'priority')", hint=_HINT
                )
            parameter.grad = gradient
        try:
            began = perf_counter()
            self._dispatcher.finish_deferred(bucket)
            current.waited(perf_counter() - began)
            self._step(set(bucket.parameters))
        finally:
            for parameter, new in zip(bucket.parameters, now, strict=True):
                parameter.grad = new

    def _step(self, parameters: set[nn.Parameter]) -> None:
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


def _stop_all(why: str) -> None:
    """Let no step wait any more, as code comes to be that reads parameters unseen."""
    possible = [update for update in _LIVE if update.possible]
    for update in possible:
        update.stop(why)
    if possible:
        unwatch_modules()


@functools.cache
def _settle_at_the_end() -> None:
    """Have ``hvd.join()`` and ``hvd.shutdown()`` wait for what is under way: Horovod drops it."""

    def settling(function: Callable[..., Any]) -> Callable[..., Any]:
        def settle_first(*args: Any) -> Any:
            for update in list(_LIVE):
                # Another rank may be gone; and an end must not fail for what comes before it.
                with contextlib.suppress(mpi_ops.HorovodInternalError, ConfigurationError):
                    update.settle_all()
            return function(*args)

        return settle_first

    # Below the names by which scripts may have imported them already.
    library, own_library = mpi_ops.mpi_lib, mpi_ops._basics.MPI_LIB_CTYPES
    library.horovod_torch_join = settling(library.horovod_torch_join)
    own_library.horovod_shutdown = settling(own_library.horovod_shutdown)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "buckets fill in what is missing"
    return parameter.grad


def _kept(value: Any) -> Any:
    """A value of now: schedules change a learning rate that is a tensor in place."""
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
