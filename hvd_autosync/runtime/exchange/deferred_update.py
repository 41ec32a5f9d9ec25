"""Deferred update (knob ``order``: ``priority``): a layer's step waits until its next forward.

Backward produces the last layers' gradients first, and the next forward needs the first layers
first. So the first layers' gradients are sent first, and a parameter is stepped when it is
accessed: by forward, by ``state_dict()``, or by whatever else Python does with it
(:mod:`hvd_autosync.runtime.exchange.reaching`). The mathematics is that of an ordinary step, and
communication overlaps with the next forward too (P3, Jayarajan et al. 2019; ByteScheduler, Peng et
al. 2019).

Code that reads a parameter without Python's knowledge, as compiled code does, would read it a step
too old. So the first steps are a rehearsal: they are made at once, and it is checked whether every
parameter is accessed before its gradient arrives. A parameter that is not is never deferred, and
none is once code is compiled. Ranks need not agree on what is deferred: the same is sent in any
case.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hvd_autosync.errors import AutosyncError, ConfigurationError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.operations import (
    CollectiveError,
    collectives,
    copies_to_host,
    once_per_rank,
)
from hvd_autosync.runtime.collectives.settling import settle_before
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
from hvd_autosync.runtime.measure.compute_timer import Waiting
from hvd_autosync.runtime.state.group_swap import ParameterGroupSwap, own_class, steps_by_element
from hvd_autosync.runtime.state.optimizer_states import held_state
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.weak_methods import weakly

_HINT = "Leave the knob order out of the strategy, or set it to 'arrival'."

#: Steps in which gradients are observed, and the last step that is made at once.
_OBSERVED, _REHEARSED = 2, 3

#: Those with deferred steps, which must be made even if the script drops their optimizer.
_WAITING: set[Any] = set()


@once_per_rank
def _live() -> weakref.WeakSet[Any]:
    """Those of this rank, whose operations no other rank waits for."""
    return weakref.WeakSet()


class DeferredUpdate:
    """The deferred steps of one optimizer.

    Steps are deferred once two steps have shown that the script drops gradients after a step
    (``zero_grad()`` by default does) and does not change them, since they may still be in flight,
    and two rehearsals have shown how each parameter is accessed.

    Args:
        optimizer: Horovod's optimizer, of our class.
        dispatcher: Its dispatcher.
    """

    def __init__(self, optimizer: Any, dispatcher: Dispatcher) -> None:
        self._optimizer = optimizer
        self._dispatcher = dispatcher
        self._possible = True
        #: Gradients after the last step, with their versions, during observation.
        self._seen: list[tuple[nn.Parameter, torch.Tensor, int]] = []
        #: Steps in which the optimizer alone uses the gradients, and whether such a one goes on.
        self._steps = 0
        self._in_step = False
        #: Deferrable buckets, as far as is known, with their parameters' memory.
        self._deferrable: dict[Bucket, list[Memory]] = {}
        #: Deferred steps: parameter -> its bucket; bucket -> what is to be done.
        self._waiting: dict[nn.Parameter, Bucket] = {}
        self._own_steps: dict[Bucket, _OwnStep] = {}
        self._group_swap = ParameterGroupSwap(optimizer)
        #: The class of parameters that were not accessed since the last step, and these parameters.
        self._reach = weakly(self.settle)
        self._class = marked_class(self._reach, weakly(self.arrived))
        self._marked: set[nn.Parameter] = set()
        self._warned: set[str] = set()
        _live().add(self)
        _settle_at_the_end()
        before_compiling(_stop_all)
        if not steps_by_element(optimizer):
            self.stop(f"{own_class(optimizer).__name__} steps all parameters together")
        elif anything_compiled():
            self.stop(COMPILED)

    @property
    def possible(self) -> bool:
        """Whether steps may be deferred, now or later."""
        return self._possible

    def steps_any(self, parameters: Collection[nn.Parameter]) -> bool:
        """Return whether its optimizer steps any of these parameters."""
        return not self._optimizer._requires_update.isdisjoint(parameters)

    def stop(self, why: str) -> None:
        """Make all deferred steps, and defer none from now on.

        Args:
            why: The reason, for rank 0's message.
        """
        self.settle_all()
        self._possible = False
        self._deferrable = {}
        warn_on_rank_0(f"order 'priority': steps are not deferred to the next forward: {why}")

    def close(self) -> None:
        """Make all deferred steps, and watch modules no longer."""
        self.settle_all()
        self._possible = False
        _live().discard(self)
        unwatch_modules(self._reach)

    def arrived(self, parameter: nn.Parameter) -> None:
        """A gradient was computed; the last step of its parameter must have been made.

        Raises:
            ConfigurationError: It has not.
        """
        if parameter in self._waiting:
            raise ConfigurationError(
                "order 'priority': a parameter was read without Python's knowledge, before its "
                "deferred step",
                hint=_HINT,
            )
        if parameter in self._marked:
            self._unmark(parameter)
            self._drop({parameter}, "read without Python's knowledge")

    def choose(self, *, in_step: bool) -> Collection[Bucket]:
        """Return the buckets to defer; called in each step, before any gradient is used.

        Args:
            in_step: Whether the optimizer's own step alone uses the gradients.
        """
        for parameter, gradient, version in self._seen:
            if parameter.grad is gradient or gradient._version != version:
                self.stop("the script keeps or changes gradients after step()")
                break
        self._seen = []
        self._steps += in_step
        self._in_step = in_step
        if not in_step or self._steps <= _REHEARSED:
            return ()
        shared = {
            b for b, memories in self._deferrable.items() if any(m.shared() for m in memories)
        }
        if shared:
            self._warn(sum(len(b.parameters) for b in shared), "also part of other tensors")
        return self._deferrable.keys() - shared

    def begin(self, deferred: Collection[Bucket]) -> None:
        """The optimizer's step begins, without the ``deferred`` buckets."""
        options: dict[nn.Parameter, dict[str, Any]] = {}
        for group in self._optimizer.param_groups:
            own = {name: _kept(value) for name, value in group.items() if name != "params"}
            options.update(dict.fromkeys(group["params"], own))
        for bucket in deferred:
            self._own_steps[bucket] = _OwnStep(self._optimizer, bucket.parameters, options)
            self._waiting.update(dict.fromkeys(bucket.parameters, bucket))
            _WAITING.add(self)
        self._group_swap.make(lambda whole: () if whole in self._waiting else (whole,))
        self._mark(self._waiting)

    def put_back(self) -> None:
        """The optimizer's step is over."""
        self._group_swap.undo()
        in_step, self._in_step = self._in_step, False
        if not in_step or not self._possible or self._steps > _REHEARSED:
            return
        if self._steps <= _OBSERVED:
            parameters = [p for bucket in self._dispatcher.buckets for p in bucket.parameters]
            self._seen = [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]
        if self._steps == _OBSERVED:
            self._watch()
        if self._steps >= _OBSERVED:
            self._mark({p for bucket in self._deferrable for p in bucket.parameters})

    @contextlib.contextmanager
    def dropping_gradients(self) -> Iterator[None]:
        """Let gradients be dropped meanwhile without triggering deferred steps."""
        for parameter in self._marked:
            parameter.__class__ = nn.Parameter
        try:
            yield
        finally:
            for parameter in self._marked:
                parameter.__class__ = self._class

    def settle(self, parameter: nn.Parameter) -> None:
        """Make the deferred step of ``parameter``, if there is one, with its whole bucket."""
        bucket = self._waiting.get(parameter)
        if bucket is not None:
            self._settle(bucket)
        elif parameter in self._marked:
            self._unmark(parameter)

    def settle_all(self) -> None:
        """Make all deferred steps."""
        while self._own_steps:
            self._settle(next(iter(self._own_steps)))
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
        """Watch accesses to parameters, where that is possible."""
        buckets = [b for b in self._dispatcher.buckets if b.deferrable]
        parameters = {p for b in buckets for p in b.parameters}
        plain = {p for p in parameters if type(p) is nn.Parameter}
        self._deferrable = {b: [Memory(p) for p in b.parameters] for b in buckets}
        self._drop(parameters - watch_modules(plain, self._reach), "not in Python modules")
        # A copy into a gradient looks like a change of the script's.
        copied = {p for p in parameters if copies_to_host(p)}
        self._drop(copied, "on a GPU, and this Horovod, without NCCL, reduces them on the host")

    def _drop(self, parameters: set[nn.Parameter], why: str) -> None:
        """Never defer the steps of some parameters, nor of others in their buckets."""
        dropped = {b for b in self._deferrable if not parameters.isdisjoint(b.parameters)}
        self._deferrable = {
            b: memories for b, memories in self._deferrable.items() if b not in dropped
        }
        self._warn(sum(len(b.parameters) for b in dropped), why)

    def _warn(self, count: int, why: str) -> None:
        if count and why not in self._warned:
            self._warned.add(why)
            warn_on_rank_0(
                f"order 'priority': the steps of at least {amount(count, 'parameter')} are not "
                f"deferred: {'it is' if count == 1 else 'they are'} {why}"
            )

    def _settle(self, bucket: Bucket) -> None:
        own_step = self._own_steps.pop(bucket)
        for parameter in bucket.parameters:
            del self._waiting[parameter]
            self._unmark(parameter)
        try:
            own_step.check()
            with Waiting(current.waited):
                self._dispatcher.finish_deferred(bucket)
            own_step.make()
        finally:
            if not self._waiting:
                _WAITING.discard(self)


class _OwnStep:
    """The optimizer's own step for the parameters of a bucket, as it would be now, made later.

    Until then the script may change options, as a schedule does, groups, and states. So the step is
    one of another optimizer of the script's class, whose parameters are others of the same memory.

    Args:
        optimizer: The optimizer.
        parameters: Those of the bucket, with gradients; one that is in no group is not stepped.
        options: Parameter -> the options of its group; they stay as they are.
    """

    def __init__(
        self,
        optimizer: Any,
        parameters: Collection[nn.Parameter],
        options: Mapping[nn.Parameter, dict[str, Any]],
    ) -> None:
        self._optimizer = optimizer
        self._parameters = [parameter for parameter in parameters if parameter in options]
        #: The script's states, and what is in them.
        self._states = [optimizer.state.setdefault(each, {}) for each in self._parameters]
        self._before = [dict(state) for state in self._states]
        self._twins = [nn.Parameter(p.detach(), p.requires_grad) for p in self._parameters]
        groups: dict[int, dict[str, Any]] = {}
        for parameter, twin in zip(self._parameters, self._twins, strict=True):
            twin.grad = parameter.grad
            own = options[parameter]
            groups.setdefault(id(own), {**own, "params": []})["params"].append(twin)
        self._stepping: Any = object.__new__(own_class(optimizer))
        vars(self._stepping).update(vars(optimizer))
        self._stepping.param_groups = list(groups.values())
        copies = zip(self._twins, map(dict, self._before), strict=True)
        self._stepping.state = defaultdict(dict, copies)
        values = [value for state in self._before for value in state.values()]
        tensors = [twin.grad for twin in self._twins]
        tensors += [value for value in values if isinstance(value, torch.Tensor)]
        self._used = [(tensor, tensor._version) for tensor in tensors if tensor is not None]

    def check(self) -> None:
        """Check that what it uses is as it was.

        Raises:
            AutosyncError: The script has changed a gradient, or a state, in place.
        """
        if any(tensor._version != version for tensor, version in self._used):
            # It ends the training: no plan that does not fit, which others could follow.
            raise AutosyncError(
                "order 'priority': a gradient or an optimizer's state was changed in place after "
                "step()",
                hint=_HINT,
            )

    def make(self) -> None:
        """Make it; what the script has removed of the states meanwhile stays removed."""
        step = own_class(self._optimizer).step
        # Without the script's hooks, which have run in the step that this is a part of. torch adds
        # them to a class when it creates the first optimizer of it.
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        step(self._stepping)
        its = zip(self._parameters, self._twins, self._states, self._before, strict=True)
        for parameter, twin, state, before in its:
            if held_state(self._optimizer, parameter) is not state:
                continue
            for name, value in self._stepping.state[twin].items():
                if state.get(name) is before.get(name):
                    state[name] = value
            if not state:  # as before, for an optimizer without states
                dict.pop(self._optimizer.state, parameter)  # which fetches nothing


def collect_dropped(parameters: Collection[nn.Parameter]) -> None:
    """Collect earlier optimizers of some parameters that the script has dropped.

    A script collects them itself before it creates another one, as their hooks act until then. But
    deferred steps have kept an optimizer until the script has read its parameters, perhaps just
    now.

    Args:
        parameters: Those of the optimizer that is being created.
    """
    found = [update for update in _live() if update.steps_any(parameters)]
    while found:
        found.pop().settle_all()
        if not found:
            gc.collect()


def _stop_all(why: str) -> None:
    """Defer no step any more: compiled code may read parameters without Python's knowledge."""
    possible = [update for update in _live() if update.possible]
    for update in possible:
        update.stop(why)
    if possible:
        unwatch_modules()


def _settle_live() -> None:
    for update in list(_live()):
        update.settle_all()


@once_per_rank
def _settle_at_the_end() -> None:
    """Make deferred steps before ``hvd.join()`` and ``hvd.shutdown()``, which drop operations.

    So do re-initializations.
    """

    def settle() -> None:
        for update in list(_live()):
            # Another rank may be gone, and join() or shutdown() must not fail for deferred steps.
            with contextlib.suppress(CollectiveError, AutosyncError):
                update.settle_all()

    settle_before(_settle_live)
    collectives().before_leaving(settle)


def _kept(value: Any) -> Any:
    """Return a copy of an option: schedules change a learning rate that is a tensor in place."""
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
