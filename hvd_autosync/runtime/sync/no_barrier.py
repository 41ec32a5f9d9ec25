"""The phase without a barrier of one optimizer: it begins on all ranks, and ends where all stop.

Between its beginning and its end parameter servers make the steps (``asynchronous.py``). Ranks stop
together at the ends of epochs, or where rank 0 has told them to, and then continue or end it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.collectives.agreement import add_up, gather_bytes
from hvd_autosync.runtime.collectives.operations import Sum, allreduce, rank, size
from hvd_autosync.runtime.collectives.settling import without_barrier
from hvd_autosync.runtime.collectives.state_rpc import StateServer
from hvd_autosync.runtime.collectives.warn_once import warn_on_rank_0
from hvd_autosync.runtime.guard.handler import LossGuardHandler
from hvd_autosync.runtime.state.group_swap import ParameterGroupSwap
from hvd_autosync.runtime.state.partition import put_together
from hvd_autosync.runtime.state.replicas import Replicas
from hvd_autosync.runtime.state.states import encode_entries, parameters_of, take_states
from hvd_autosync.runtime.stragglers.policy import StragglerPolicy
from hvd_autosync.runtime.sync.asynchronous import Asynchronous, PeerMessage
from hvd_autosync.runtime.sync.sample_counter import SampleCounter
from hvd_autosync.runtime.sync.stopping import Stopping
from hvd_autosync.runtime.sync.suitability import check_owned
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.util.weak_methods import once_gone

_T = TypeVar("_T")


@dataclass(frozen=True)
class Met:
    """What all ranks know after they have stopped.

    Attributes:
        waiting: Whether ranks wait for each other from now on.
        broken: Whether some loss was not accepted.
        unequal: Whether ranks are in different places of their epochs.
        same_steps: Whether all have made the same number of steps.
    """

    waiting: bool
    broken: bool
    unequal: bool
    same_steps: bool


class NoBarrier:
    """The phase; creating it is a collective.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        optimizer: Horovod's optimizer, of our class.
        protocol: ASP or SSP.
        guard_handler: The handler of its loss guard.
        stragglers: Knows whether there still is a straggler.
        sample_counter: Counts samples.
        replicas: Its parameters and statistics.
        summed: Whether learning rates fit the sum of all ranks' gradients rather than their mean.

    Attributes:
        stopping: Stops a segment in the middle of an epoch.
        interrupted: Whether this segment began in the middle of epochs, whose ends are still to
            come.
        owed: Whether gradients were synchronized, and no step was made of them yet.
    """

    def __init__(
        self,
        name: str,
        optimizer: Any,
        protocol: Protocol,
        guard_handler: LossGuardHandler,
        stragglers: StragglerPolicy,
        sample_counter: SampleCounter,
        replicas: Replicas,
        *,
        summed: bool,
    ) -> None:
        self.interrupted = False
        self.owed = False
        self.stopping = Stopping(guard_handler, stragglers)
        self._name = name
        self._optimizer = weakref.ref(optimizer)
        self._protocol = protocol
        self._guard_handler = guard_handler
        self._sample_counter = sample_counter
        self._replicas = replicas
        self._summed = summed
        self._state_server = StateServer(f"phases.{name}", self.answer)
        self._close_server = once_gone(optimizer, self._state_server.close)
        self._made: Asynchronous | None = None

    @property
    def asynchronous(self) -> Asynchronous:
        """The steps of the phase, once it has begun."""
        assert self._made is not None, "it has begun"
        return self._made

    @property
    def at_beginning(self) -> bool:
        """Whether this rank has begun no step since all ranks were at the same one."""
        return self.asynchronous.clock == 0 and not self.owed

    @property
    def staleness(self) -> dict[int, int]:
        """Staleness of a gradient, in steps of other ranks -> number of gradients."""
        return {} if self._made is None else self._made.staleness

    def begin(self, step: int, arrival_order: Sequence[torch.nn.Parameter]) -> None:
        """Begin, with equal parameters and states on all ranks; a collective.

        Args:
            step: Steps so far.
            arrival_order: Parameters in the order in which their gradients arrive; others follow.

        Raises:
            AutosyncError: Ranks could not send each other the optimizer's states when it ends.
        """
        self._replicas.check_states("steps without a barrier cannot begin")
        self._guard_handler.on_quiescent(step, waiting=True)
        if self._made is None:
            owner = self._owner
            watched = owner._requires_update
            everything = [each for each in parameters_of(owner) if each in watched]
            self._made = Asynchronous(
                self._name,
                owner,
                self._protocol,
                summed=self._summed,
                order=list(dict.fromkeys([*arrival_order, *everything])),
                on_message=self._on_message,
            )
        self._made.begin()
        without_barrier.add(self)
        self.interrupted = True
        self.owed = False

    def run_step(self, step: Callable[[], _T]) -> _T:
        """Run the optimizer's own step, which steps nothing: parameter servers do."""
        owner = self._owner
        check_owned(owner)
        group_swap = ParameterGroupSwap(owner)
        group_swap.make(lambda _: ())
        try:
            result = step()
        finally:
            group_swap.undo()
        self.owed = False
        return result

    def end_step(self) -> None:
        """A step was made, or one that was skipped is counted.

        Raises:
            AutosyncError: Another rank is gone.
        """
        self.asynchronous.exchange(skipped=self.owed)
        self.owed = False

    def stops(self, computed_s: float) -> bool:
        """Report the step that was ended last; return whether this rank is to stop after it.

        Args:
            computed_s: The seconds that it took.
        """
        return self.stopping.stepped(self.asynchronous, computed_s)

    def meet(self, step: int, *, ended: bool, leaving: bool, interrupted: bool) -> Met:
        """Stop where all ranks stop, synchronize, and continue or end the phase; a collective.

        Args:
            step: Steps of this rank so far.
            ended: Whether this rank's epoch is over.
            leaving: Whether the phase ends.
            interrupted: Whether this rank's epoch continues later.

        Raises:
            AutosyncError: Another rank is gone.
            ConfigurationError: Some ranks have ended their epochs, others interrupt them.
        """
        asynchronous = self.asynchronous
        self.interrupted = interrupted
        asynchronous.drain()
        new_samples = self._sample_counter.new_samples()
        own = [ended, leaving, interrupted, new_samples, step, step**2, asynchronous.clock]
        at_their_end, leaving_ranks, interrupting, samples, steps, squares, clocks = add_up(
            own, f"hvd_autosync.phases.{self._name}.meet", asynchronous.check
        )
        if not leaving_ranks:
            _check_interrupting(interrupting)
        self._sample_counter.add(samples, step)
        asynchronous.refresh()
        self._replicas.average_statistics()
        asynchronous.await_drained()  # the losses have arrived before
        # From here on no rank changes what another is about to read.
        broken_ranks, slow, behind, gradients = self._add_up_reports()
        self.stopping.straggler_present = slow > 0
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
        return Met(
            waiting=waiting,
            broken=broken_ranks > 0,
            # In the middle of their epochs ranks have different numbers of steps left.
            unequal=at_their_end < size() and clocks > 0,
            same_steps=size() * squares == steps**2,
        )

    def whole_states(self) -> dict[int, dict[str, Any]]:
        """Return the states of the parameter servers: place of the parameter -> its state.

        Raises:
            AutosyncError: A rank cannot be reached.
        """
        answers = [self.answer(), *self._state_server.fetch_all()]
        return put_together([], parameters_of(self._owner), answers)

    def answer(self) -> bytes:
        """Return this rank's shards' states, encoded for another rank; called in a thread too."""
        return encode_entries([]) if self._made is None else self._made.encoded_states()

    def close(self) -> None:
        """Close and drop what other ranks are connected to; on all ranks, between two phases."""
        self._close_server()
        if self._made is not None:
            self._made.close()
            self._made = None

    @property
    def _owner(self) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None, "its owner is alive"
        return optimizer

    def _on_message(self, source: int, message: PeerMessage) -> None:
        """Handle a message that is not about parameters, in the service thread."""
        if self._made is not None:
            self.stopping.on_message(self._made, source, message)

    def _add_up_reports(self) -> list[float]:
        """Sums over ranks: broken; slow; total staleness; gradients."""
        own = [
            self.stopping.broken,
            self.stopping.straggler_present and rank() == 0,
            sum(age * count for age, count in self.staleness.items()),
            sum(self.staleness.values()),
        ]
        name = f"hvd_autosync.phases.{self._name}.met"
        sums = allreduce(torch.tensor(own, dtype=torch.float64, device="cpu"), op=Sum, name=name)
        return [float(each) for each in sums]

    def _take_back(self, asynchronous: Asynchronous) -> None:
        """Restore all states on all ranks; a collective."""
        texts = gather_bytes(self.answer(), f"hvd_autosync.phases.{self._name}.states")
        take_states(self._owner, put_together([], parameters_of(self._owner), texts))
        asynchronous.end()
        without_barrier.discard(self)


def _check_interrupting(ranks: float) -> None:
    if ranks not in (0, size()):
        raise ConfigurationError(
            f"{ranks:.0f} of {size()} ranks begin another epoch in the middle of one, during "
            "steps without a barrier",
            hint="Evaluate on all ranks or between epochs, or leave the protocol knobs out of the "
            "strategy.",
        )
