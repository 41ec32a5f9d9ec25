"""Phases of a training: steps that all ranks make together (BSP), and steps without a barrier.

All ranks change the phase at once: from BSP after a vote, else where an epoch ends or rank 0 says.
What a script evaluates or saves after an epoch is the same on all ranks::

    BSP ... | vote: begin | steps without a barrier | meet: epoch ended on all ranks, or stop | ...
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.agreement import agree_steps, same_on_all, tell_all
from hvd_autosync.runtime.collectives.operations import Sum, allreduce, rank, size
from hvd_autosync.runtime.collectives.warn_once import warn_on_rank_0
from hvd_autosync.runtime.guard.handler import LossGuardHandler
from hvd_autosync.runtime.measure.compute_timer import ComputeTimer, Waiting
from hvd_autosync.runtime.method import SyncMethod
from hvd_autosync.runtime.patches.epochs import SyncPoint
from hvd_autosync.runtime.patches.join_hook import JoinHook, register_join_hook, remove_join_hook
from hvd_autosync.runtime.patches.scalers import equalize_loss_scale
from hvd_autosync.runtime.state.progress import EpochProgress
from hvd_autosync.runtime.state.rank_states import States
from hvd_autosync.runtime.state.replicas import Replicas
from hvd_autosync.runtime.stragglers.dynamic_batching import DynamicBatching
from hvd_autosync.runtime.stragglers.membership import Membership
from hvd_autosync.runtime.stragglers.policy import StragglerPolicy
from hvd_autosync.runtime.sync.nested import Nested
from hvd_autosync.runtime.sync.no_barrier import Met, NoBarrier
from hvd_autosync.runtime.sync.phase import Phase, TrainingPhase, Votes
from hvd_autosync.runtime.sync.sample_counter import SampleCounter
from hvd_autosync.runtime.sync.suitability import (
    check_alone,
    refuse_more_parameters,
    refuse_split_batches,
)
from hvd_autosync.search_space.protocol import Protocol

_T = TypeVar("_T")
#: Key of an entry of checkpoints; it is part of their format.
_PHASES = "hvd_autosync_phases"


class ProtocolPhases(Nested, JoinHook):
    """The phases of one optimizer; creating it attaches it, which is a collective.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        optimizer: Horovod's optimizer, of our class.
        inner: The method of the phase with barriers.
        protocol: Defines the phases.
        guard_handler: The handler of its loss guard.
        arrival_order: Returns its parameters in the order in which their gradients arrive.
        phase: The phase of the training.
        progress: Counts its steps.
        summed: Whether learning rates fit the sum of all ranks' gradients rather than their mean.
    """

    def __init__(
        self,
        name: str,
        optimizer: Any,
        inner: SyncMethod,
        protocol: Protocol,
        guard_handler: LossGuardHandler,
        arrival_order: Callable[[], Sequence[torch.nn.Parameter]],
        phase: TrainingPhase,
        progress: EpochProgress,
        *,
        summed: bool,
    ) -> None:
        super().__init__(inner)
        self._name = f"hvd_autosync.phases.{name}"
        self._optimizer = weakref.ref(optimizer)
        self._protocol = protocol
        self._guard_handler = guard_handler
        self._arrival_order = arrival_order
        self._phase = phase
        self._progress = progress
        self._epochs = progress.epochs
        self._dynamic_batching: DynamicBatching | None = None
        if protocol.stragglers == "balance":
            self._dynamic_batching = DynamicBatching(rank(), size(), self._epochs)
        register_join_hook(self)
        #: Whether the script uses gradients before the optimizer does.
        self._script_uses_gradients = False
        self._sample_counter = SampleCounter(protocol, self._epochs)
        self._votes = Votes(
            "staying synchronous: no epoch end seen yet. Use a torch.utils.data.DataLoader with a "
            "length, or call hvd_autosync.average(optimizer) where parameters must be the same on "
            "all ranks"
        )
        replicas = Replicas(name, optimizer)
        self._membership = Membership(replicas, summed=summed)
        self._stragglers = StragglerPolicy(protocol.stragglers, size())
        shared = guard_handler, self._stragglers, self._sample_counter, replicas
        self._no_barrier = NoBarrier(name, optimizer, protocol, *shared, summed=summed)
        self.compute_timer = ComputeTimer()

    @property
    def running(self) -> bool:
        """Whether steps have no barrier now."""
        return self._phase.now is Phase.NO_BARRIER

    @property
    def step(self) -> int:
        """Steps of this rank so far."""
        return self._progress.step

    @property
    def replicas_in_sync(self) -> bool:
        """Whether parameters are the same on all ranks, and all have made the same steps."""
        return self._same_steps and (self.running or self.inner.replicas_in_sync)

    @property
    def near_average(self) -> bool:
        """As of :class:`SyncMethod`."""
        return self._same_steps and (self.running or self.inner.near_average)

    @property
    def _same_steps(self) -> bool:
        if self.running:
            return self._no_barrier.at_beginning
        return self._membership.replicas_in_sync

    @property
    def staleness(self) -> dict[int, int]:
        """Staleness of a gradient, in steps of other ranks -> number of gradients."""
        return self._no_barrier.staleness

    @property
    def straggler_noticed(self) -> bool:
        """Whether a straggler is being handled now."""
        present = self._no_barrier.stopping.straggler_present
        return bool(self._membership.absent) or present or self._batches_differ

    def on_gradient_ready(self, parameter: torch.nn.Parameter) -> None:
        """A gradient is complete."""
        if not self.running:
            self.inner.on_gradient_ready(parameter)
        elif not self._script_uses_gradients:
            self._no_barrier.asynchronous.arrived(parameter)

    def on_extra_gradient(self) -> None:
        """A gradient that was complete was added to: refuse a batch that the script has split."""
        if self._batches_differ:
            refuse_split_batches()
        self.inner.on_extra_gradient()

    def on_synchronize(self, *, in_step: bool, fresh: bool) -> None:
        """Gradients are about to be used; without a barrier they are not reduced."""
        if not in_step:
            # From now on they are pushed after the script is done with them.
            self._script_uses_gradients = True
        if self.running:
            self._no_barrier.owed |= fresh
            return
        self._await_device()
        with Waiting(self.compute_timer.waited):
            self.inner.on_synchronize(in_step=in_step, fresh=fresh)
        if self._membership.absent and self._phase.now is not Phase.ROUNDS:
            watched = self._owner._requires_update
            self._membership.rescale([p.grad for p in watched if p.grad is not None])

    def run_step(self, step: Callable[[], _T]) -> _T:
        """Run the optimizer's own step; without a barrier parameter servers make it."""
        return (self._no_barrier if self.running else self.inner).run_step(step)

    def settle_skipped(self) -> None:
        """Count a skipped step, with all that counts steps; servers get no gradients of it."""
        if not self.running:
            self.inner.settle_skipped()
        elif self._no_barrier.owed:
            self._owner._sync.end_skipped()

    def on_skip(self) -> None:
        """A gradient scaler may have skipped the step; without a barrier, of this rank alone."""
        if self.running:
            self.settle_skipped()
        else:
            self.inner.on_skip()

    def on_step_end(self) -> None:
        """A step was made.

        Raises:
            AutosyncError: Another rank is gone.
        """
        if not self.running and self._phase.now is Phase.ROUNDS:
            self._await_device()
        with Waiting(self.compute_timer.waited):
            if self.running:
                self._no_barrier.end_step()
                self._progress.stepped()
            else:
                self.inner.on_step_end()
        check_alone(self, self._protocol)
        computed_s = self.compute_timer.stepped()
        if self._dynamic_batching is not None:
            self._dynamic_batching.stepped(computed_s)
        with Waiting(self.compute_timer.waited):
            stops = self.running and self._no_barrier.stops(computed_s)
            if self._epochs.at_end and not self._same_steps:
                self._end_epoch()
            elif stops:
                self._meet(ended=False, leaving=True)
            elif not self.running and self.inner.replicas_in_sync and self._due():
                self._vote()

    def at_sync_point(self, why: SyncPoint) -> None:
        """Make parameters equal: stop where all ranks do; a collective.

        Raises:
            ConfigurationError: Only some ranks are there.
        """
        if why is SyncPoint.SCRIPT:
            self._progress.script_averages = True
        if self.running:
            self.settle_skipped()  # which may be the end of the epoch
        if not self.running:
            self.inner.at_sync_point(why)
        if why is not SyncPoint.EVALUATION:
            self._end_epoch()
        elif self.running and not self._same_steps:
            self._meet(ended=True, interrupted=True)
        # Else ranks step together and have the same parameters.

    def about_to_join(self) -> None:
        """Stop where all ranks do: others may go on without this one, and would wait for it."""
        if self.running:
            self.settle_skipped()  # which may be where they stop
            if self.running:
                self._meet(ended=True, leaving=True)
            else:
                self._end_epoch()

    def all_joined(self) -> None:
        """All ranks have just left ``join()``; a collective."""
        self._membership.unequal = False
        self._progress.step = self._votes.last = agree_steps(self.step, self._name)
        equalize_loss_scale(self._optimizer(), self._name)
        # A rank that waited there has missed votes.
        self._sample_counter.agree(f"{self._name}.samples")
        if not same_on_all([self._stragglers.windows], f"{self._name}.windows"):
            self._stragglers.forget()
        if self._dynamic_batching is not None:
            self._dynamic_batching.forget()

    def make_exact(self, *, together: bool) -> None:
        """Stay synchronous from now on, with equal batches."""
        if together:
            self._equalize()
        if not self.running:
            self._no_barrier.close()
        super().make_exact(together=together)

    def before_more_parameters(self) -> None:
        """Refuse them if steps have no barrier, or may have none later."""
        if self.running or self._protocol.share < 1 or self._protocol.stragglers == "greedy":
            refuse_more_parameters()
        super().before_more_parameters()

    def before_loading(self) -> None:
        """Refuse it while other ranks have the states.

        Raises:
            ConfigurationError: They have.
        """
        if self.running:
            raise ConfigurationError(
                "cannot load_state_dict() of the optimizer while its states are with their owners, "
                "during steps without a barrier",
                hint="Load a checkpoint before the training, or leave the protocol knobs out of "
                "the strategy.",
            )
        super().before_loading()

    def before_sharing(self) -> None:
        """Return whole parameters and states to all ranks; a collective."""
        self.settle_skipped()
        if self.running:
            self._meet(ended=False, leaving=True)
        super().before_sharing()

    def whole_states(self) -> dict[int, dict[str, Any]]:
        """Return the states of the parameter servers: place of the parameter -> its state.

        Raises:
            AutosyncError: A rank cannot be reached.
        """
        return (self._no_barrier if self.running else self.inner).whole_states()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs for the phases to continue."""
        return {**super().state_dict(), _PHASES: self._place()}

    def load_state_dict(self, entries: dict[str, Any]) -> States | None:
        """Continue where :meth:`state_dict` was called; the optimizer loads that checkpoint too."""
        own = super().load_state_dict(entries)
        if entries.get(_PHASES):
            self._go_to(entries[_PHASES])
        return own

    def share(self, root: int) -> None:
        """Let all ranks continue where rank ``root`` is; a collective."""
        super().share(root)
        place = tell_all(json.dumps(self._place()).encode(), f"{self._name}.place", root)
        self._go_to(json.loads(place))

    def detach(self) -> dict[str, Any]:
        """End the phases, after as many steps on all ranks; a collective.

        Returns:
            As of :meth:`SyncMethod.detach`.

        Raises:
            ConfigurationError: Ranks have made different numbers of steps; they make all further
                ones together, by this protocol.
        """
        self.settle_skipped()
        if self.running:
            # Where all have made the same steps, they have as many left as under any plan.
            self._membership.unequal = not self._meet(ended=False, leaving=True).same_steps
        if not self._membership.replicas_in_sync:
            raise ConfigurationError(
                "ranks have made different numbers of steps, and have different numbers left",
                hint="Change how ranks synchronize at the end of an epoch.",
            )
        self._equalize()
        samples = agree_steps(self._sample_counter.save(), f"{self._name}.samples")
        place = {"samples": samples, "counted": self._epochs.samples}
        self._no_barrier.close()
        remove_join_hook(self)
        return {**super().detach(), _PHASES: place}

    def _place(self) -> dict[str, Any]:
        return {"step": self.step, "samples": self._sample_counter.save()}

    def _go_to(self, place: dict[str, Any]) -> None:
        self._membership.unequal = False
        self._progress.step = place.get("step", self.step)
        self._sample_counter.load(place["samples"], place.get("counted"))
        self._votes.last = self.step - Votes.EVERY

    def _equalize(self) -> None:
        """Make the batches of all ranks equal from now on; a collective."""
        if self._dynamic_batching is not None:
            planned = agree_steps(self._dynamic_batching.planned, f"{self._name}.planned")
            self._dynamic_batching.end(planned)

    def _end_epoch(self) -> None:
        """An epoch is over: stop where all ranks do; a collective."""
        if self.running:
            # An interrupted epoch is still to be ended if some ranks have no step left.
            if self._no_barrier.interrupted or not self._same_steps:
                self._meet(ended=True)
        else:
            self._membership.epoch_ended()

    def _await_device(self) -> None:
        """Wait for the accelerator, so that its work in this step counts as compute time."""
        if self._protocol.stragglers != "none" and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    @property
    def _batches_differ(self) -> bool:
        return self._dynamic_batching is not None and self._dynamic_batching.unequal

    @property
    def _owner(self) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None, "its owner is alive"
        return optimizer

    def _due(self) -> bool:
        if self._phase.now is Phase.EXACT:
            return False
        watched = self._protocol.stragglers != "none"
        if self._protocol.needs_total and not self._protocol.total and not watched:
            if self.step == 1:
                warn_on_rank_0(
                    "staying synchronous: the number of samples is not known yet. Set total_samples"
                )
            return False
        return self._votes.due(self.step)

    def _vote(self) -> None:
        """Begin steps without a barrier if they are due; a collective."""
        self._votes.last = self.step
        # The elastic policy truncates a straggler's epoch, and a script that averages itself has
        # none to truncate.
        known = self._epochs.seen or (
            self._progress.script_averages and self._protocol.stragglers != "elastic"
        )
        own = [known, self._sample_counter.new_samples(), self.compute_timer.seconds]
        if self._dynamic_batching is not None:
            own += self._dynamic_batching.vote()
        votes = torch.zeros(size(), len(own), dtype=torch.float64, device="cpu")
        votes[rank()] = torch.tensor(own, dtype=torch.float64, device="cpu")
        received = allreduce(votes, op=Sum, name=f"{self._name}.vote")
        in_favour, samples = received[:, :2].sum(0).tolist()
        seconds = received[:, 2].tolist()
        self._sample_counter.add(samples, self.step)
        if self._dynamic_batching is not None and not self._membership.unequal:
            self._dynamic_batching.voted(received[:, 3:].tolist())
        waiting = self._sample_counter.synchronous
        # Excluded ranks do not vote: the others must not learn what those cannot know.
        slow = frozenset() if self._membership.unequal else self._stragglers.window(seconds)
        if self._membership.unequal or (waiting and not slow):
            return
        if not self._votes.passed(in_favour, self.step, wanted=True, known=known):
            return
        if waiting and self._protocol.stragglers == "elastic":
            if self._membership.exclude(slow):
                self._epochs.truncate()
        else:
            self._begin()

    def _begin(self) -> None:
        self.inner.average()  # with what a codec has left out of the rounds so far
        self.inner.make_whole()
        self._no_barrier.begin(self.step, self._arrival_order())
        self._phase.enter(Phase.NO_BARRIER)
        if current.run_summary is not None:
            current.run_summary.without_barrier = True

    def _meet(self, *, ended: bool, leaving: bool = False, interrupted: bool = False) -> Met:
        """As of :meth:`NoBarrier.meet`; ranks are in the next phase after it."""
        met = self._no_barrier.meet(
            self.step, ended=ended, leaving=leaving, interrupted=interrupted
        )
        if not met.waiting:
            return met
        self._phase.enter(Phase.EXCHANGE)
        self._stragglers.forget()
        self._progress.step = self._votes.last = agree_steps(self.step, self._name)
        equalize_loss_scale(self._owner, self._name)
        if met.broken:
            self._guard_handler.fall_back()
        self._membership.unequal = met.unequal
        if met.unequal and ended and not interrupted:
            self._membership.resync()
        return met
