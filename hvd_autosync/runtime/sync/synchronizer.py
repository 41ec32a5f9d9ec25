"""The synchronizer of one optimizer: attaches a method of synchronization, and changes it.

A plan becomes methods, one inside the other. Between two steps they can be detached, and those of
another plan attached in their place: live tuning changes methods so. The fallback of the loss guard
keeps its methods, and makes them exact. In between, parameters are equal and states are whole on
every rank. What goes on: parameters, optimizer states, running statistics, the steps and samples
made so far, error feedback that both plans have, the loss guard with its snapshots, and the weights
of batches that a loader has prefetched (``stragglers/dynamic_batching.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

import torch

from hvd_autosync.errors import AutosyncError, ConfigurationError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.agreement import agree_any, agree_parameters, agree_steps
from hvd_autosync.runtime.collectives.messaging import check_messaging
from hvd_autosync.runtime.collectives.operations import once_per_rank, rank, size
from hvd_autosync.runtime.exchange.changed_gradients import Habits
from hvd_autosync.runtime.exchange.exchanges import Scaling
from hvd_autosync.runtime.exchange.gradient_exchange import (
    CODEC_STATES,
    GradientExchange,
    check_plan,
)
from hvd_autosync.runtime.exchange.planning import layout
from hvd_autosync.runtime.guard.handler import LossGuardHandler
from hvd_autosync.runtime.method import SyncMethod
from hvd_autosync.runtime.patches.epochs import Epochs, SyncPoint
from hvd_autosync.runtime.patches.scalers import watch_scalers
from hvd_autosync.runtime.state.progress import EpochProgress, Progress
from hvd_autosync.runtime.sync.averaging import Averaging
from hvd_autosync.runtime.sync.local_steps import LocalSteps
from hvd_autosync.runtime.sync.phase import Phase, TrainingPhase
from hvd_autosync.runtime.sync.phases import ProtocolPhases
from hvd_autosync.runtime.sync.suitability import check_balance, check_optimizer
from hvd_autosync.search_space.exchange_plan import PARAMETER_CLASSES, Classes, ClassPlan, class_of
from hvd_autosync.search_space.sync_plan import SyncPlan

#: Key of an entry of checkpoints; it is part of their format.
_EXACT = "hvd_autosync_exact"
#: Parameter -> its name and its class.
Names = Mapping[torch.nn.Parameter, tuple[str, str]]


@once_per_rank
def _numbers() -> Iterator[int]:
    """Numbers of the plans that are attached on this rank, in order."""
    return itertools.count()


class Synchronizer:
    """Synchronizes one optimizer with those of the other ranks.

    Args:
        plan: How.

    Attributes:
        plan: The plan that is followed.
        method: The method of the plan, which does nothing until :meth:`attach`.
        guard: Its loss guard.
        chosen: Whether the script itself has chosen the plan, which live tuning leaves alone then.
    """

    def __init__(self, plan: SyncPlan) -> None:
        self.plan = plan
        self.method: SyncMethod = SyncMethod()
        self.guard = LossGuardHandler()
        self.chosen = False
        #: The optimizer; none before :meth:`attach`, which is not called for one rank alone, nor
        #: for an optimizer without parameters to train.
        self._optimizer: Callable[[], Any] = lambda: None
        self._phase = TrainingPhase()
        #: Horovod's own exchange, if the optimizer begins with it.
        self._horovods: SyncMethod | None = None
        self._progress = Progress()
        self._parameters: list[torch.nn.Parameter] = []
        self._averaged = True
        self._name = ""
        #: What a method may continue with that an earlier one has left.
        self._left: dict[str, Any] = {}
        self._habits = Habits()

    def attach(
        self,
        optimizer: Any,
        parameters: list[torch.nn.Parameter],
        *,
        averaged: bool,
        horovods: SyncMethod | None = None,
    ) -> None:
        """Synchronize ``optimizer`` from its next step on; a collective, unless ``horovods``.

        Args:
            optimizer: Horovod's optimizer, of our class.
            parameters: All that it reduces, in its order; at least one.
            averaged: Whether gradients are averaged over ranks rather than added up.
            horovods: Horovod's own exchange, if the optimizer begins with it, because ranks do not
                create it together.

        Raises:
            AutosyncError: The plan does not fit the parameters or the job, or ranks differ.
        """
        self._optimizer = weakref.ref(optimizer)
        self._parameters = parameters
        self._averaged = averaged
        names = self._named(self.plan.classes)
        self._name = names[parameters[0]][0]
        self._horovods = horovods
        if horovods is not None:
            self.method = horovods
            return
        self._check(self.plan, names)
        self._make_method(self.plan, names)
        _warn_of_empty_classes(self.plan, {name for _, name in names.values()})

    def check(self) -> None:
        """Check that ranks have the same parameters for the plan; a collective.

        Raises:
            AutosyncError: They do not.
        """
        self._check(self.plan, self._named(self.plan.classes))

    def start_over(self) -> None:
        """Go back to Horovod's own exchange, if it was the first, as ranks are gone; no collective.

        The plan is exact.
        """
        if self._horovods is None:
            return
        self.method.abandon()
        self.method, self.plan = self._horovods, SyncPlan()
        self._progress, self._left = Progress(), {}

    def before_loading(self) -> None:
        """Prepare for states that the optimizer is about to load."""
        if current.live is not None and current.live.failed:
            # Elastic Horovod restores before it begins again: until then all operations fail.
            self.start_over()
        self.method.before_loading()

    def switch(self, plan: SyncPlan) -> None:
        """Synchronize by another plan from the next step on; a collective between two steps.

        All ranks call it after the same number of steps.

        Args:
            plan: The plan. After a fallback of the loss guard its exact part is followed.

        Raises:
            AutosyncError: The plan does not fit the parameters or the job, ranks differ, a step has
                begun, or ranks have made different numbers of steps; training can go on.
        """
        if self._phase.now is Phase.EXACT:
            plan = plan.exact()
        names = self._named(plan.classes)
        self._check(plan, names)
        begun = any(delay <= 0 for delay in self._owner._allreduce_delay.values())
        if any(agree_any([begun], f"{self._name}.begun")):
            raise ConfigurationError(
                "how ranks synchronize cannot change between backward() and step()",
                hint="Change it after step().",
            )
        before = self.plan
        self._left |= self.method.detach()
        if self._phase.now is Phase.EXACT:  # the guard has ended what was still under way
            plan, before = plan.exact(), before.exact()
        try:
            self._make_method(plan, names)
        except AutosyncError:  # on all ranks
            self._make_method(before, self._named(before.classes))
            self.method.load_state_dict(self._left)
            raise
        self.method.load_state_dict(self._left)
        self._left.pop(CODEC_STATES, None)  # the method has copies

    @property
    def replicas_in_sync(self) -> bool:
        """Whether :meth:`at_sync_point` has nothing to do, not even to make an average exact."""
        return self.method.replicas_in_sync and self.method.average_is_exact

    def at_sync_point(self, why: SyncPoint) -> None:
        """As of :class:`SyncMethod`."""
        in_sync, began = self.replicas_in_sync, perf_counter()
        self.method.at_sync_point(why)
        if current.run is not None and not in_sync:
            current.run.averaged_between_steps(perf_counter() - began)

    def end_step(self) -> None:
        """A step was made, or one that was skipped is counted."""
        optimizer = self._optimizer()
        if current.losses is not None and optimizer is not None:
            current.losses.stepped(optimizer)
        self.method.on_step_end()
        if self._phase.now is not Phase.NO_BARRIER:
            self.guard.stepped(self.method, self._progress.agreed_step)

    def end_skipped(self) -> None:
        """Count a step that this rank has skipped, perhaps alone; all that count steps do, too."""
        losses = current.losses
        with contextlib.nullcontext() if losses is None else losses.skipping():
            self.end_step()
            for watcher in (current.run, current.live, current.watch, current.run_summary):
                if watcher is not None:
                    watcher.optimizer_stepped(self._owner)

    def make_exact(self, *, together: bool) -> None:
        """Exchange gradients uncompressed in every step, whatever the plan is.

        Args:
            together: Whether all ranks call it, as for a collective; else they load a checkpoint.
        """
        self.guard.end()
        self.method.make_exact(together=together)
        self._phase.enter(Phase.EXACT)

    @property
    def exact(self) -> bool:
        """Whether a lossy strategy has ended."""
        return self._phase.now is Phase.EXACT

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside the optimizer's states."""
        guarded = self.guard.watches or self.exact
        return {**self.method.state_dict(), **({_EXACT: self.exact} if guarded else {})}

    def load_state_dict(self, entries: dict[str, Any]) -> dict[int, dict[str, Any]] | None:
        """As of :class:`SyncMethod`."""
        return self.method.load_state_dict(entries)

    @staticmethod
    def is_exact(entries: dict[str, Any]) -> bool:
        """Return whether a checkpoint was saved after a fallback."""
        return bool(entries.get(_EXACT))

    @property
    def _owner(self) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None, "its owner is alive"
        return optimizer

    def _named(self, classes: Classes) -> Names:
        known = self._owner._parameter_names
        names = {parameter: str(known[parameter]) for parameter in self._parameters}
        return {parameter: (name, class_of(name, classes)) for parameter, name in names.items()}

    def _check(self, plan: SyncPlan, names: Names) -> None:
        """Raise on all ranks if the plan cannot be followed; a collective."""
        optimizer = self._owner
        how = (
            f"{plan.effective_exchange} with {optimizer.op}, "
            f"{optimizer.gradient_predivide_factor}, {plan.schedule}, {plan.protocol}"
        )
        places = layout(plan.effective_exchange, list(names))
        shapes = [
            (name, f"{tuple(parameter.shape)} {parameter.dtype} {parameter_class} {place}")
            for (parameter, (name, parameter_class)), place in zip(
                names.items(), places, strict=True
            )
        ]
        agree_parameters([("the plan", how), *shapes])
        check_plan(plan.effective_exchange, names)
        if plan.protocol is not None:
            check_optimizer(optimizer)
            check_balance(
                plan.protocol,
                local_steps=plan.schedule is not None,
                passes_per_step=optimizer.backward_passes_per_step,
            )
            check_messaging(self._name)

    def _make_method(self, plan: SyncPlan, names: Names) -> None:
        """Create the methods of a plan, the innermost first; a collective."""
        optimizer = self._owner
        if plan.lossy:
            watch_scalers()
        # Several optimizers may have first parameters of the same name.
        number = next(_numbers())
        name = f"{number}.{self._name}"
        if plan.effective_exchange.order == "priority":
            # Gradients of a deferred update are under way while another optimizer's begin.
            names = {p: (f"{number}.{own}", group) for p, (own, group) in names.items()}
        if plan.replicas_may_differ:
            self.method = self._over_replicas(name, plan, names)
        else:
            self.method = self._exchange(plan, names)
        self.plan = plan
        if plan.lossy and current.run is None and not self.guard.watches:
            self.guard.watch(name, optimizer)

    def _exchange(self, plan: SyncPlan, names: Names) -> GradientExchange:
        optimizer, exchange = self._owner, plan.effective_exchange
        factor = optimizer.gradient_predivide_factor
        scaling = Scaling(1 / factor, factor / size()) if self._averaged else Scaling()
        return GradientExchange(
            self._name, optimizer, exchange, names, scaling, self._progress, self._habits
        )

    def _over_replicas(self, name: str, plan: SyncPlan, names: Names) -> SyncMethod:
        """Return the methods of a plan under which replicas may differ."""
        optimizer = self._owner
        progress = self._progress
        if not isinstance(progress, EpochProgress):
            step = agree_steps(progress.step, name)
            self._progress = progress = EpochProgress(optimizer, Epochs(self), step)
        exchange = self._exchange(plan, names)
        method: SyncMethod = exchange
        if plan.schedule is not None:
            averaging = Averaging(name, names, plan.effective_exchange)
            method = LocalSteps(
                name, optimizer, method, plan.schedule, averaging, self._phase, progress
            )
        if plan.protocol is not None:
            method = ProtocolPhases(
                name,
                optimizer,
                method,
                plan.protocol,
                self.guard,
                lambda: exchange.arrival_order,
                self._phase,
                progress,
                summed=not self._averaged,
            )
        return method


def switch(optimizer: Any, plan: SyncPlan) -> None:
    """Synchronize an optimizer by another plan, as :meth:`Synchronizer.switch` does.

    Args:
        optimizer: A strategy optimizer.
        plan: The plan.
    """
    optimizer._sync.switch(plan)


def _warn_of_empty_classes(plan: SyncPlan, present: set[str]) -> None:
    """Warn of a plan that the optimizer begins with, and that may name parameters wrongly.

    Live tuning takes names from the profile of the model, whose parameters several optimizers may
    share: a class that one of them lacks is no mistake there.
    """
    for parameter_class in PARAMETER_CLASSES:
        special = plan.effective_exchange.of(parameter_class) != ClassPlan()
        if special and parameter_class not in present and rank() == 0:
            warnings.warn(
                f"no parameter of this optimizer is of class {parameter_class}, for which the "
                "strategy has knobs; check that its classes have names of named_parameters",
                stacklevel=2,
            )
