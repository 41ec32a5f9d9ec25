"""ZeRO step: the steps that owners make of their shards, with optimizer states only they have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.collectives.operations import Sum, allreduce_async_, size, synchronize
from hvd_autosync.runtime.exchange.dispatcher import Dispatcher
from hvd_autosync.runtime.exchange.own_gradients import OwnGradients, holding_gradients
from hvd_autosync.runtime.exchange.replica_checksum import CHECKSUMS, replica_checksum
from hvd_autosync.runtime.exchange.zero_bucket import ZeroBucket
from hvd_autosync.runtime.state.group_swap import ParameterGroupSwap, steps_by_element
from hvd_autosync.runtime.state.optimizer_states import OptimizerStates, held_state
from hvd_autosync.runtime.state.partition import Part, put_together
from hvd_autosync.runtime.state.states import (
    Entry,
    decode_entries,
    encode_entries,
    parameters_of,
    take_states,
)
from hvd_autosync.util.weak_methods import weakly

#: Name of the gradient among the states of a part, as ranks fetch them.
_GRADIENT = "hvd_autosync.gradient"


class FetchedStates:
    """Answers other ranks' requests for this rank's states; outlives the optimizer.

    Two threads use it without a lock: the one that trains replaces the list and never changes it,
    and the one that answers reads it once. The tensors in it are the optimizer's own. The next step
    changes them only after a vote of all ranks, and a rank that asks votes when it has all answers.

    Attributes:
        entries: States and gradients of this rank's parts after the last step; replaced as a
            whole.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def answer(self) -> bytes:
        """Return the states, encoded for another rank."""
        return encode_entries(self.entries)


class ZeroStep:
    """The ZeRO step of one optimizer.

    Owners step their shards while the script leaves everything to ``step()``. If a script uses the
    reduced gradients before (``synchronize()``, as for clipping), it gets them whole, and every
    rank makes the whole step from then on. So it does once the script reads the states or the
    gradients after a step, which it then finds whole, too; and where replicas are not equal, which
    owners would make them: by parameters, states or learning rates that differ, or since a rank
    has waited in ``join()``.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        optimizer: Horovod's optimizer, of our class.
        dispatcher: Its dispatcher.
        fetched: Holds this rank's answer to other ranks.
        fetch_all: Returns every other rank's answer.
        parameters: Those that owners may step.

    Attributes:
        missed: Whether some rank has missed a step, in which this one took part.
    """

    missed = False

    def __init__(
        self,
        name: str,
        optimizer: Any,
        dispatcher: Dispatcher,
        fetched: FetchedStates,
        fetch_all: Callable[[], Sequence[bytes]],
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        self._name = f"hvd_autosync.owners.{name}"
        #: In favour, and the checksum of this rank's replica, and its square.
        self._votes = torch.zeros(3, dtype=torch.int64, device="cpu")
        self._vote: int | None = None
        self._optimizer = optimizer
        self._dispatcher = dispatcher
        self._fetch_all = fetch_all
        self._first = parameters
        self._given_up = not steps_by_element(optimizer)
        self._group_swap = ParameterGroupSwap(optimizer)
        #: Whether owners have stepped since every rank had the whole states.
        self._apart = False
        #: State of each part between steps.
        self._states: dict[torch.nn.Parameter, dict[str, Any]] = {}
        #: What the optimizer held after the last step.
        self._left = OptimizerStates()
        self._fetched = fetched
        #: Whether the script has read what others had, so that this rank has all of it.
        self._asked = False
        self._own_gradients = OwnGradients(weakly(self._give_whole))

    def gradients_change(self) -> None:
        """Gradients of another step arrive, or the script drops those of the last one."""
        self._own_gradients.take_back()

    def close(self) -> None:
        """It is used no more."""
        self._left.fetch = None
        self._own_gradients.restore()

    def vote(self, *, in_step: bool) -> None:
        """Start the vote on whether only owners make the step.

        It must be called before waiting for the exchanges of this step.

        Ranks may reach the same step in different ways: one uses its gradients before, others do
        not.

        Args:
            in_step: Whether on this rank the optimizer is the first to use the gradients.
        """
        self._own_gradients.take_back()
        parameters = self._parameters() if self._dispatcher.buckets else self._first
        if not self._given_up and parameters:
            self._notice_reset()
            self._left.fetch = None  # the script reads no more before the step
            checksum = (replica_checksum(self._optimizer, parameters) + self._apart) % CHECKSUMS
            in_favour = in_step and not self.missed and not self._asked
            in_favour = in_favour and not any(holding_gradients(parameters))
            own = [in_favour, checksum, checksum**2]
            self._votes.copy_(torch.tensor(own, device="cpu"))
            self._vote = allreduce_async_(self._votes, name=f"{self._name}.vote", op=Sum)

    def synchronized(self) -> None:
        """All exchanges of this step are done, and their gradients are about to be used."""
        owned = [bucket for bucket in self._buckets() if bucket.owned]
        if self._vote is not None:
            in_favour, total, squares = synchronize(self._vote).tolist()
            self._vote = None
            equal = size() * squares == total**2  # the variance of the checksums is 0
            if owned and (in_favour < size() or not equal):
                self._given_up = True
        if owned and self._given_up:
            self.collect()
            self._dispatcher.run(bucket.share_gradients() for bucket in owned)
        elif owned:
            for bucket in owned:
                bucket.take_gradients()
            self._put_in()
        if owned and not self._apart:
            # Every rank has collected the states before it sent what has arrived.
            self._fetched.entries = []

    def put_back(self) -> bool:
        """End the optimizer's step; return whether owners made it."""
        if not self._group_swap.made:
            return False
        self._group_swap.undo()
        for bucket in self._buckets():
            for part in bucket.parts:
                part.values.grad = None
                state = self._optimizer.state.pop(part.values, None)
                if state:
                    self._states[part.values] = state
        self._left = OptimizerStates.put_into(self._optimizer)
        self._left.fetch = weakly(self._give_whole)
        self._fetched.entries = self._entries()
        return True

    def share(self) -> None:
        """Distribute the parameters that owners have stepped to all ranks."""
        self._dispatcher.run(bucket.share_parameters() for bucket in self._buckets())
        factors = {p: size() * b.factor for b in self._buckets() for p in b.parameters}
        self._own_gradients.put(factors)

    def collect(self) -> None:
        """Restore the whole states on this rank, because owners do not make this step."""
        self._notice_reset()
        if self._apart:
            states, gradients = ({}, {}) if self._asked else self._fetch_whole()
            self._own_gradients.fill(gradients)
            self.forget()
            self._put_whole({p: state for p, state in states.items() if not self._holds(p)})

    def forget(self) -> None:
        """Drop the parts' states, because the optimizer is about to load others."""
        self._apart = False
        self._left.fetch = None
        self._states = {}

    def whole_states(self) -> dict[int, dict[str, Any]]:
        """Return the owners' states, merged: place of the parameter -> its state.

        Raises:
            ConfigurationError: It is called between ``backward()`` and ``step()``, when owners may
                have stepped already.
        """
        self._notice_reset()
        if not self._apart or self._asked:
            return {}
        if self._dispatcher.busy:
            raise ConfigurationError(
                "exchange 'sharded': optimizer.state_dict() is not possible between backward() and "
                "step()",
                hint="Call it after step(), or use another exchange.",
            )
        return self._by_place(self._fetch_whole()[0])

    def _give_whole(self) -> None:
        """Let this rank have the whole states and gradients, because the script reads some."""
        self._notice_reset()
        if not self._asked:
            states, gradients = self._fetch_whole()
            self._asked = True
            self._left.fetch = None
            self._own_gradients.fill(gradients)
            self._put_whole({p: state for p, state in states.items() if not self._holds(p)})

    def _holds(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether the script has written a state of a parameter that owners have."""
        return bool(held_state(self._optimizer, parameter))

    def _put_whole(self, states: dict[torch.nn.Parameter, dict[str, Any]]) -> None:
        """Let the optimizer hold whole states, also of parameters that it steps no longer."""
        take_states(self._optimizer, self._by_place(states))
        for parameter in states.keys() - set(parameters_of(self._optimizer)):
            self._optimizer.state[parameter] = states[parameter]

    def _notice_reset(self) -> None:
        """Drop the parts' states if the script has reset the optimizer's since the last step.

        It does so on all ranks, as with any optimizer whose replicas are to stay equal.
        """
        if self._apart and self._left.reset_in(self._optimizer):
            self.forget()

    def _buckets(self) -> list[ZeroBucket]:
        return [b for b in self._dispatcher.buckets if isinstance(b, ZeroBucket)]

    def _put_in(self) -> None:
        """Let the optimizer hold parts in place of their parameters."""
        self._notice_reset()
        parts: dict[torch.nn.Parameter, list[Part]] = {}
        for bucket in self._buckets():
            for parameter in bucket.parameters:
                parts.setdefault(parameter, [])
            for part in bucket.parts:
                parts[part.piece.whole].append(part)
        self._cut_states(parts)
        self._group_swap.make(
            lambda whole: (part.values for part in parts[whole]) if whole in parts else (whole,)
        )
        self._optimizer.state.update(self._states)
        self._apart = True

    def _cut_states(self, parts: dict[torch.nn.Parameter, list[Part]]) -> None:
        """Split whole states, as at the start or after loading, and keep the parts' own."""
        for parameter, own in parts.items():
            if whole := self._optimizer.state.pop(parameter, None):
                for part in own:
                    self._states[part.values] = part.piece.cut_state(whole)

    def _parameters(self) -> list[torch.nn.Parameter]:
        """Those of the buckets, equal on all ranks; the script may have dropped some meanwhile."""
        return list(dict.fromkeys(p for bucket in self._buckets() for p in bucket.parameters))

    def _entries(self) -> list[Entry]:
        places = {p: place for place, p in enumerate(self._parameters())}
        return [
            part.piece.entry(
                places[part.piece.whole], {**self._states.get(part.values, {}), _GRADIENT: gradient}
            )
            for bucket in self._buckets()
            for part, gradient in bucket.parts_with_gradients()
        ]

    def _fetch_whole(
        self,
    ) -> tuple[dict[torch.nn.Parameter, dict[str, Any]], dict[torch.nn.Parameter, torch.Tensor]]:
        """Return the gradients of the last step and, if owners have them, the states after it."""
        parameters = self._parameters()
        answers = map(decode_entries, self._fetch_all())
        entries = [*self._entries(), *itertools.chain.from_iterable(answers)]
        if not self._apart:  # this rank has others, or none
            entries = [_gradient_alone(entry) for entry in entries]
        whole = put_together(entries, parameters)
        gradients = {parameters[place]: state.pop(_GRADIENT) for place, state in whole.items()}
        return {parameters[place]: state for place, state in whole.items() if state}, gradients

    def _by_place(
        self, states: dict[torch.nn.Parameter, dict[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """Return the states of the optimizer's own parameters, by their place in it."""
        own = enumerate(parameters_of(self._optimizer))
        return {place: states[parameter] for place, parameter in own if parameter in states}


def _gradient_alone(entry: Entry) -> Entry:
    state = {_GRADIENT: entry.state[_GRADIENT]}
    return replace(entry, state=state, by_element=frozenset(state))
