"""Phases of a training: steps that all ranks make together (BSP), and steps without a barrier.

All ranks change the phase at once. From BSP they do so after a vote in some step. Without a barrier
they do so only where all of them stop: at the end of an epoch, or when rank 0 has told them to.
What a script evaluates or saves after an epoch is the same on all ranks::

    BSP ... | vote: begin | steps without a barrier | meet: epoch ended on all ranks, or stop | ...
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.agreement import (
    add_up,
    agree_steps,
    gather_bytes,
    same_on_all,
    tell_all,
)
from hvd_autosync.runtime.collectives.operations import Sum, allreduce, rank, size
from hvd_autosync.runtime.collectives.state_rpc import StateServer
from hvd_autosync.runtime.collectives.warn_once import WarnOnce, warn_on_rank_0
from hvd_autosync.runtime.guard.handler import LossGuardHandler
from hvd_autosync.runtime.measure.compute_timer import ComputeTimer
from hvd_autosync.runtime.patches.epochs import Epochs
from hvd_autosync.runtime.patches.join_hook import JoinHook, register_join_hook
from hvd_autosync.runtime.state.rank_states import parameters_of
from hvd_autosync.runtime.state.replicas import Replicas
from hvd_autosync.runtime.state.states import (
    decode_entries,
    encode_entries,
    put_together,
    take_states,
)
from hvd_autosync.runtime.stragglers.dynamic_batching import DynamicBatching
from hvd_autosync.runtime.stragglers.membership import Membership
from hvd_autosync.runtime.stragglers.policy import StragglerPolicy
from hvd_autosync.runtime.sync.asynchronous import Asynchronous, PeerMessage
from hvd_autosync.runtime.sync.local_steps import LocalSteps
from hvd_autosync.runtime.sync.sample_counter import SampleCounter
from hvd_autosync.runtime.sync.stopping import Stopping
from hvd_autosync.runtime.sync.suitability import check_alone
from hvd_autosync.search_space.protocol import Protocol

_LOG = logging.getLogger(__name__)
#: Steps between two votes on the phase.
_VOTE_EVERY = 8


class ProtocolPhases(JoinHook):
    """The phases of one optimizer; creating it is a collective.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        optimizer: Horovod's optimizer, of our class.
        protocol: Defines the phases.
        guard_handler: The handler of its loss guard.
        local: Its local steps in the phase with barriers, if it has any.
        summed: Whether learning rates fit the sum of all ranks' gradients rather than their mean.

    Attributes:
        running: Whether steps have no barrier now.
        step: Steps of this rank so far.
    """

    def __init__(
        self,
        name: str,
        optimizer: Any,
        protocol: Protocol,
        guard_handler: LossGuardHandler,
        local: LocalSteps | None,
        *,
        summed: bool,
    ) -> None:
        self.running = False
        self.step = 0
        self._name = f"hvd_autosync.phases.{name}"
        self._own_name = name
        self._optimizer = weakref.ref(optimizer)
        self._protocol = protocol
        self._guard_handler = guard_handler
        self._summed = summed
        self._local = local
        self._epochs = Epochs(self)
        self._dynamic_batching: DynamicBatching | None = None
        if protocol.stragglers == "balance":
            self._dynamic_batching = DynamicBatching(rank(), size(), self._epochs)
        register_join_hook(self)
        self._state_server = StateServer(f"phases.{name}", self._answer)
        weakref.finalize(optimizer, self._state_server.close).atexit = False
        self._asynchronous: Asynchronous | None = None
        #: Parameters in the order in which their gradients arrived in the first step.
        self._order: dict[torch.nn.Parameter, None] = {}
        #: Whether the script uses gradients before the optimizer does.
        self._script_uses_gradients = False
        self._script_averages = False
        self._sample_counter = SampleCounter(protocol, self._epochs)
        self._voted = 0
        #: Whether training stays synchronous.
        self._stopped = False
        #: Whether this segment began in the middle of epochs, whose ends are still to come.
        self._interrupted = False
        self._no_epoch_end = WarnOnce(
            "staying synchronous: no epoch end seen yet. Use a torch.utils.data.DataLoader with a "
            "length, or call hvd_autosync.average(optimizer) where parameters must be the same on "
            "all ranks"
        )
        self._replicas = Replicas(name, optimizer)
        self._membership = Membership(self._replicas, summed=summed)
        self._stragglers = StragglerPolicy(protocol.stragglers, size())
        self._stopping = Stopping(guard_handler, self._stragglers)
        self.compute_timer = ComputeTimer()

    @property
    def unsynchronized(self) -> bool:
        """Whether steps have no barrier, or may have none later."""
        return self.running or self._protocol.share < 1 or self._protocol.stragglers == "greedy"

    @property
    def replicas_in_sync(self) -> bool:
        """Whether parameters are the same on all ranks, and all have made the same steps."""
        if self._asynchronous is not None and self.running:
            return self._asynchronous.clock == 0
        return self._membership.replicas_in_sync

    @property
    def staleness(self) -> dict[int, int]:
        """Staleness of a gradient, in steps of other ranks -> number of gradients."""
        return {} if self._asynchronous is None else self._asynchronous.staleness

    @property
    def straggler_noticed(self) -> bool:
        """Whether a straggler is being handled now."""
        return bool(self._membership.absent) or self._stragglers.present or self.balanced

    @property
    def balanced(self) -> bool:
        """Whether ranks have batches of different sizes."""
        return self._dynamic_batching is not None and self._dynamic_batching.unequal

    def arrived(self, parameter: torch.nn.Parameter) -> None:
        """A gradient is complete."""
        if self.running:
            assert self._asynchronous is not None, "it runs"
            if not self._script_uses_gradients:
                self._asynchronous.arrived(parameter)
        elif self._asynchronous is None:
            self._order[parameter] = None  # the first step's order, others change nothing

    def script_uses_gradients(self) -> None:
        """The script uses gradients itself: from now on they are pushed after it is done."""
        self._script_uses_gradients = True

    def await_device(self) -> None:
        """Wait for the accelerator, so that its work in this step counts as compute time."""
        if self._protocol.stragglers != "none" and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    def exchange(self) -> None:
        """Exchange in a step without a barrier, after the optimizer's own step.

        Raises:
            AutosyncError: Another rank is gone.
        """
        assert self._asynchronous is not None, "it runs"
        self._asynchronous.exchange()

    def stepped(self) -> None:
        """A step was made."""
        self.step += 1
        check_alone(self, self._protocol)
        computed_s = self.compute_timer.stepped()
        self._epochs.stepped()
        if self._dynamic_batching is not None:
            self._dynamic_batching.stepped(computed_s)
        began = perf_counter()
        if self._epochs.at_end and not self.replicas_in_sync:
            self.average()
        elif self.running:
            self._step_without_barrier(computed_s)
        elif (self._local is None or self._local.replicas_in_sync) and self._due():
            self._vote()
        self.compute_timer.waited(perf_counter() - began)

    def sync_for_eval(self) -> None:
        """Another loader's epoch begins in the middle of one, as for an evaluation; a collective.

        Raises:
            ConfigurationError: Only some ranks are there.
        """
        if self.running:
            self._meet(ended=True, interrupted=True)
        # Else ranks step together and have the same parameters.

    def average(self) -> None:
        """An epoch is over: stop where all ranks do; a collective."""
        if self._optimizer() is None:
            return  # the optimizer was dropped before its iterator
        if self.running:
            # An interrupted epoch is still to be ended if some ranks have no step left.
            if self._interrupted or not self.replicas_in_sync:
                self._meet(ended=True)
        else:
            self._membership.epoch_ended()

    def average_for_script(self) -> None:
        """The script calls for equal parameters; its epochs need not be visible."""
        self._script_averages = True
        self.average()

    def all_joined(self) -> None:
        """All ranks have just left ``join()``; a collective."""
        self._membership.unequal = False
        self.step = agree_steps(self.step, self._name)
        self._voted = self.step
        # A rank that waited there has missed votes.
        self._sample_counter.agree(f"{self._name}.samples")
        if not same_on_all([self._stragglers.windows], f"{self._name}.windows"):
            self._stragglers.forget()
        if self._dynamic_batching is not None:
            self._dynamic_batching.forget()

    def equalize(self) -> None:
        """Make the batches of all ranks equal from now on; a collective."""
        if self._dynamic_batching is not None:
            planned = agree_steps(self._dynamic_batching.planned, f"{self._name}.planned")
            self._dynamic_batching.end(planned)

    def stop(self) -> None:
        """Stay synchronous from now on."""
        self._stopped = True

    def leave(self) -> None:
        """Return whole parameters and states to all ranks; a collective."""
        if self.running:
            self._meet(ended=False, leaving=True)

    def whole_states(self) -> dict[int, dict[str, Any]]:
        """The states of the parameter servers: place of the parameter -> its state.

        Raises:
            AutosyncError: A rank cannot be reached.
        """
        if not self.running:
            return {}
        answers = [self._answer(), *self._state_server.fetch_all()]
        entries = [entry for answer in answers for entry in decode_entries(answer)]
        return put_together(entries, parameters_of(self._owner))

    def save(self) -> dict[str, Any]:
        """What a checkpoint needs for the phases to continue."""
        return {"step": self.step, "samples": self._sample_counter.save()}

    def load(self, saved: dict[str, Any]) -> None:
        """Continue where :meth:`save` was called; the optimizer loads that checkpoint too."""
        self._membership.unequal = False
        self.step = saved["step"]
        self._sample_counter.load(saved["samples"])
        self._voted = self.step - _VOTE_EVERY

    def share(self, root: int) -> None:
        """Let all ranks continue where rank ``root`` is; a collective."""
        received = tell_all(json.dumps(self.save()).encode(), f"{self._name}.place", root)
        self.load(json.loads(received))

    def _answer(self) -> bytes:
        asynchronous = self._asynchronous
        return encode_entries([] if asynchronous is None else asynchronous.entries())

    @property
    def _owner(self) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None, "its owner is alive"
        return optimizer

    def _due(self) -> bool:
        if self._stopped:
            return False
        watched = self._protocol.stragglers != "none"
        if self._protocol.needs_total and not self._protocol.total and not watched:
            if self.step == 1:
                warn_on_rank_0(
                    "staying synchronous: the number of samples of this training is not known yet. "
                    "Set total_samples"
                )
            return False
        return self.step == 1 or self.step - self._voted >= _VOTE_EVERY

    def _vote(self) -> None:
        """Begin steps without a barrier if they are due; a collective."""
        self._voted = self.step
        # The elastic policy truncates a straggler's epoch, and a script that averages itself has
        # none to truncate.
        known = self._epochs.seen or (
            self._script_averages and self._protocol.stragglers != "elastic"
        )
        own = [known, self._sample_counter.new_samples(), self.compute_timer.seconds]
        if self._dynamic_batching is not None:
            own += self._dynamic_batching.vote()
        votes = torch.zeros(size(), len(own), dtype=torch.float64)
        votes[rank()] = torch.tensor(own, dtype=torch.float64)
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
        if in_favour == size():
            if waiting and self._protocol.stragglers == "elastic":
                if self._membership.exclude(slow):
                    self._epochs.truncate()
            else:
                self._begin()
        elif not known:
            self._no_epoch_end.seen(self.step)
        if known:
            self._no_epoch_end.gone()

    def _begin(self) -> None:
        _LOG.debug("step %d: ranks stop waiting for each other", self.step)
        if self._local is not None:
            self._local.pause()
        self._guard_handler.on_quiescent(self.step, waiting=True)
        if self._asynchronous is None:
            watched = self._owner._requires_update
            everything = [each for each in parameters_of(self._owner) if each in watched]
            self._asynchronous = Asynchronous(
                self._own_name,
                self._owner,
                self._protocol,
                summed=self._summed,
                order=list(dict.fromkeys([*self._order, *everything])),
                on_message=self._on_message,
            )
        self._asynchronous.begin()
        self.running = self._interrupted = True
        if current.run_summary is not None:
            current.run_summary.without_barrier = True

    def rescale(self, gradients: Sequence[torch.Tensor]) -> None:
        """Turn means over all ranks into means over the ranks that took part."""
        self._membership.rescale(gradients)

    def _step_without_barrier(self, computed_s: float) -> None:
        assert self._asynchronous is not None, "it runs"
        if self._stopping.stepped(self._asynchronous, computed_s):
            self._meet(ended=False, leaving=True)

    def _on_message(self, source: int, message: PeerMessage) -> None:
        """Handle a message that is not about parameters, in the service thread."""
        if self._asynchronous is not None:
            self._stopping.on_message(self._asynchronous, source, message)

    def _meet(self, *, ended: bool, leaving: bool = False, interrupted: bool = False) -> None:
        """Stop where all ranks stop, synchronize, and continue or leave the phase; a collective.

        Args:
            ended: Whether this rank's epoch is over.
            leaving: Whether the phase without a barrier ends.
            interrupted: Whether this rank's epoch continues later.

        Raises:
            AutosyncError: Another rank is gone.
            ConfigurationError: Some ranks have ended their epochs, others interrupt them.
        """
        asynchronous = self._asynchronous
        assert asynchronous is not None, "it runs"
        self._interrupted = interrupted
        asynchronous.drain()
        at_their_end, leaving_ranks, interrupting, samples, steps, clocks = add_up(
            [
                ended,
                leaving,
                interrupted,
                self._sample_counter.new_samples(),
                self.step,
                asynchronous.clock,
            ],
            f"{self._name}.meet",
            asynchronous.check,
        )
        if not leaving_ranks:
            _check_interrupting(interrupting)
        self._sample_counter.add(samples, self.step)
        asynchronous.refresh()
        self._replicas.average_statistics()
        asynchronous.await_drained()  # the losses have arrived before
        # From here on no rank changes what another is about to read.
        broken_ranks, slow, behind, gradients = self._met()
        self._stragglers.present = slow > 0
        due = self._sample_counter.synchronous and not slow
        waiting = leaving_ranks + broken_ranks > 0 or due
        if gradients and (waiting or asynchronous.segment == 1):
            warn_on_rank_0(
                f"average staleness without a barrier: {behind / gradients:.1f} steps of other "
                "ranks"
            )
        if waiting:
            self._take_back(asynchronous)
        self._guard_handler.on_quiescent(
            round(steps / size()), waiting=waiting, healthy=broken_ranks == 0
        )
        if not waiting:
            asynchronous.begin_next_segment()
            return
        self._stragglers.forget()
        self.step = self._voted = agree_steps(self.step, self._name)
        _LOG.debug("step %d: ranks wait for each other again", self.step)
        if self._local is not None:
            self._local.resume()
        if broken_ranks:
            self._guard_handler.fall_back()
        # In the middle of their epochs ranks have different numbers of steps left.
        self._membership.unequal = at_their_end < size() and clocks > 0
        if self._membership.unequal and ended and not interrupted:
            self._membership.resync()

    def _met(self) -> list[float]:
        """Sums over ranks: broken; slow; total staleness; gradients."""
        own = [
            self._stopping.broken,
            self._stragglers.present and rank() == 0,
            sum(age * count for age, count in self.staleness.items()),
            sum(self.staleness.values()),
        ]
        sums = allreduce(torch.tensor(own, dtype=torch.float64), op=Sum, name=f"{self._name}.met")
        return [float(each) for each in sums]

    def _take_back(self, asynchronous: Asynchronous) -> None:
        """Restore all states on all ranks; a collective."""
        texts = gather_bytes(self._answer(), f"{self._name}.states")
        entries = [entry for text in texts for entry in decode_entries(text)]
        take_states(self._owner, put_together(entries, parameters_of(self._owner)))
        asynchronous.end()
        self.running = False


def _check_interrupting(ranks: float) -> None:
    if ranks not in (0, size()):
        raise ConfigurationError(
            f"{ranks:.0f} of {size()} ranks begin another epoch in the middle of one, during "
            "steps without a barrier",
            hint="Evaluate on all ranks or between epochs, or leave the protocol knobs out of the "
            "strategy.",
        )
