"""Steps without a barrier: each rank sends its gradients to the owners, and takes what they have.

A rank sends a bucket's gradient as soon as that is complete in backward, each owner its share of
it; the owner makes a step of it (:mod:`hvd_autosync.runtime.sync.parameter_server`) and answers
with its parameters as they are then. Before the next forward the rank waits for its own answers,
and for nothing else.

Such steps come in stretches, between moments at which all ranks stop together::

    begin | push, fresh, push, fresh, ... rest | refresh, go on | push, fresh, ... rest | end
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.torch.mpi_ops import rank, size

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.collectives.agreement import agree_order
from hvd_autosync.runtime.collectives.messaging import MessageHandler, open_endpoint
from hvd_autosync.runtime.state.rank_states import parameters_of
from hvd_autosync.runtime.state.states import Entry
from hvd_autosync.runtime.sync.parameter_server import ParameterServer, Push
from hvd_autosync.runtime.sync.shards import Bucket, Share, make_buckets
from hvd_autosync.search_space.protocol import Protocol

#: Kinds of letters: a gradient; "I have made my last step"; "what do you have?"; parameters.
_PUSH, _REST, _PULL, _FRESH = "push", "rest", "pull", "fresh"
#: How often a rank that waits for answers looks whether the others are still there.
_LOOK_S = 0.2
#: First steps of a stretch, and every how many later, in which it is looked whether all parameters
#: are as they came from their owners; in other steps those that torch has seen written to.
_CHECKED, _CHECK_EVERY = 2, 64

PeerMessage = dict[str, Any]


class Asynchronous:
    """Steps without a barrier, of one optimizer; a collective when it is made.

    Args:
        name: Tells its operations from those of others; equal on all ranks.
        optimizer: Horovod's optimizer, of our class.
        protocol: ASP or SSP, and what becomes of learning rate and momentum.
        summed: Whether learning rates fit the sum of all ranks' gradients, and not their mean.
        order: All parameters, in the order in which their gradients arrive on this rank.
        heed: Called with letters of other kinds, and the rank they are from, in the thread that
            reads them.

    Attributes:
        clock: This rank's steps in this stretch.
        stretch: Its number, from 1.
    """

    def __init__(
        self,
        name: str,
        optimizer: Any,
        protocol: Protocol,
        *,
        summed: bool,
        order: Sequence[torch.nn.Parameter],
        on_message: Callable[[int, PeerMessage], None],
    ) -> None:
        self.clock = 0
        self._of_optimizer = weakref.ref(optimizer)
        self._protocol = protocol
        self._summed = summed
        self._heed_other = on_message
        parameters = parameters_of(optimizer)
        #: Parameter -> place in the optimizer, whose groups are empty while it makes a step.
        self._places = {parameter: index for index, parameter in enumerate(parameters)}
        agreed = agree_order([self._places[each] for each in order], f"asynchronous.{name}")
        self._buckets = make_buckets(optimizer, [parameters[index] for index in agreed], size())
        self._of = {each: bucket for bucket in self._buckets for each in bucket.parameters}
        self._missing: dict[Bucket, set[torch.nn.Parameter]] = {}
        #: Bucket and owner -> version of what this rank has of it.
        self._versions: dict[tuple[int, int], int] = {}
        self._owned: ParameterServer | None = None
        self.segment = 0
        self._awaited = 0
        #: The stretch and the clock of the step that has begun.
        self._begun = 0, 0
        #: Guards what letters change, in the thread that reads them.
        self._changed = threading.Condition()
        # The thread that reads letters must not keep an optimizer that the script has dropped.
        self._mailbox = open_endpoint(f"asynchronous.{name}", _weakly(self._on_message))
        weakref.finalize(optimizer, self._mailbox.retire).atexit = False

    @property
    def _optimizer(self) -> Any:
        optimizer = self._of_optimizer()
        assert optimizer is not None, "its owner is alive"
        return optimizer

    @property
    def staleness(self) -> dict[int, int]:
        """As of :class:`ParameterServer`, of what this rank owns."""
        return {} if self._owned is None else dict(self._owned.staleness)

    def begin(self) -> None:
        """Begin the first stretch; on all ranks, with parameters and states the same on all."""
        for bucket in self._buckets:
            bucket.keep_parameters()
        shares = [Share(bucket, rank(), self._optimizer) for bucket in self._buckets]
        for parameter in self._of:
            self._optimizer.state.pop(parameter, None)
        self._versions.clear()
        with self._changed:
            self._owned = ParameterServer(shares, size(), self._protocol, summed=self._summed)
        self.go_on()

    def go_on(self) -> None:
        """Begin another stretch with what owners have; on all ranks, all of which rest."""
        assert self._owned is not None, "it has begun"
        with self._changed:
            self._owned.begin_segment()
            self.segment += 1
            self._changed.notify_all()
        self.clock = 0
        self._expect_gradients()

    def end(self) -> None:
        """Let go of parameters and states; on all ranks, all of which rest."""
        with self._changed:
            self._owned = None

    def tell(self, to: int, message: PeerMessage) -> None:
        """Send a letter of another kind; its ``kind`` says which."""
        self._mailbox.send(to, json.dumps(message).encode())

    def check(self) -> None:
        """Raise what has gone wrong.

        Raises:
            AutosyncError: Another rank is gone, or a letter could not be heeded.
        """
        self._mailbox.check()

    def arrived(self, parameter: torch.nn.Parameter) -> None:
        """A gradient is complete; its bucket is sent when all of its gradients are."""
        bucket = self._of[parameter]
        with self._changed:
            self._begin_step()
        bucket.keep_gradient(parameter)
        with self._changed:  # backward runs hooks in one thread for each device
            missing = self._missing[bucket]
            missing.discard(parameter)
            complete = not missing
        if complete:
            self._push(bucket, ())

    def exchange(self) -> None:
        """Send what was not sent of this step, and take over the parameters that owners have.

        Raises:
            AutosyncError: As of :meth:`check`.
            ConfigurationError: The script has changed parameters itself.
        """
        self._begin_step()
        for bucket, missing in self._missing.items():
            if missing:
                for parameter in missing:
                    bucket.keep_gradient(parameter)
                absent = [i for i, each in enumerate(bucket.parameters) if each.grad is None]
                self._push(bucket, absent)
        self._take_answers()
        self.clock += 1
        self._expect_gradients()

    def rest(self) -> None:
        """Say that this rank has made its last step of this stretch."""
        for owner in range(size()):
            self._send(owner, {"kind": _REST})

    def await_rest(self) -> None:
        """Wait until all letters of this stretch but those of :meth:`refresh` have come.

        Raises:
            AutosyncError: As of :meth:`check`.
        """
        assert self._owned is not None, "it has begun"
        with self._changed:
            while not self._owned.all_rest:
                self._changed.wait(_LOOK_S)
                self._mailbox.check()

    def refresh(self) -> None:
        """Take over what owners have: the same on all ranks, where all of them rest.

        Raises:
            AutosyncError: As of :meth:`check`.
        """
        for bucket in self._buckets:
            self._ask(bucket, {"kind": _PULL})
        self._take_answers()

    def entries(self) -> list[Entry]:
        """The states of what this rank owns, as they are between two steps."""
        with self._changed:
            shares = [] if self._owned is None else self._owned.shares
            return [entry for share in shares for entry in share.entries(self._places)]

    def _begin_step(self) -> None:
        """Before the first gradient of a step is sent; fresh parameters may come from then on.

        Raises:
            ConfigurationError: The script itself has changed parameters, which would be lost.
        """
        if self._begun == (self.segment, self.clock):
            return
        self._begun = self.segment, self.clock
        everything = self.clock < _CHECKED or self.clock % _CHECK_EVERY == 0
        for bucket in self._buckets:
            if (everything or bucket.moved()) and not bucket.untouched():
                raise ConfigurationError(
                    "the script has changed parameters itself, as clamp_() or load_state_dict() "
                    "do, where their owners step them: that would be lost",
                    hint="Leave protocol knobs out of the strategy of such a script.",
                )

    def _expect_gradients(self) -> None:
        self._missing = {bucket: set(bucket.parameters) for bucket in self._buckets}

    def _push(self, bucket: Bucket, absent: Sequence[int]) -> None:
        self._missing[bucket] = set()
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        head = {"kind": _PUSH, "clock": self.clock + 1, "rates": rates, "absent": absent}
        self._ask(bucket, head, bucket.flat)

    def _ask(self, bucket: Bucket, head: PeerMessage, flat: torch.Tensor | None = None) -> None:
        """Send to each owner what it will answer with fresh parameters."""
        with self._changed:
            self._awaited += size()
        for owner in range(size()):
            version = self._versions.get((bucket.number, owner), -1)
            body = None if flat is None else bucket.share_of(owner, flat)
            self._send(owner, {**head, "bucket": bucket.number, "version": version}, body)

    def _send(self, to: int, head: PeerMessage, body: torch.Tensor | None = None) -> None:
        text = json.dumps({**head, "segment": self.segment}).encode()
        self._mailbox.send(to, text, None if body is None else _memory(body))

    def _take_answers(self) -> None:
        with self._changed:
            while self._awaited:
                self._changed.wait(_LOOK_S)
                self._mailbox.check()
        for bucket in self._buckets:
            bucket.take_fresh()

    # What follows is called in the thread that reads letters.

    def _on_message(self, source: int, head: bytes, body: memoryview) -> None:
        message = json.loads(head)
        kind = message["kind"]
        if kind == _FRESH:
            self._on_answer_message(source, message, body)
        elif kind in (_PUSH, _REST, _PULL):
            with self._changed:
                while message["segment"] > self.segment:
                    self._changed.wait()  # this rank is about to begin it, too
                self._on_message_as_owner(source, message, body)
        else:
            self._heed_other(source, message)

    def _on_message_as_owner(self, source: int, message: PeerMessage, body: memoryview) -> None:
        owned = self._owned
        assert owned is not None, "nobody sends to owners after the last stretch"
        if message["kind"] == _PULL:
            self._answer(source, message["bucket"], message["version"])
            return
        if message["kind"] == _PUSH:
            push = Push(
                source,
                message["bucket"],
                message["clock"],
                message["version"],
                message["rates"],
                message["absent"],
            )
            gradient = _tensor(body, owned.shares[push.bucket].values)
            ready = owned.pushed(push, gradient)
        else:
            ready = owned.rested(source)
        for each in ready:
            self._answer(each.source, each.bucket, each.version)
        if owned.all_rest:
            self._changed.notify_all()

    def _answer(self, to: int, bucket: int, version: int) -> None:
        """Send a share as it is, unless that version is known to whom asks."""
        assert self._owned is not None, "called with it"
        share = self._owned.shares[bucket]
        # A copy: the next gradient may come before this is sent.
        values = None if version == share.version else share.values.clone()
        self._send(to, {"kind": _FRESH, "bucket": bucket, "version": share.version}, values)

    def _on_answer_message(self, owner: int, message: PeerMessage, body: memoryview) -> None:
        number = message["bucket"]
        with self._changed:
            self._versions[number, owner] = message["version"]
            if len(body):
                bucket = self._buckets[number]
                place = bucket.share_of(owner, bucket.fresh)
                place.copy_(_tensor(body, place))
            self._awaited -= 1
            if not self._awaited:
                self._changed.notify_all()


def _weakly(method: MessageHandler) -> MessageHandler:
    reference = weakref.WeakMethod(method)

    def on_message(source: int, head: bytes, body: memoryview) -> None:
        alive = reference()
        if alive is not None:
            alive(source, head, body)

    return on_message


def _memory(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, whatever its type."""
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _tensor(body: memoryview, like: torch.Tensor) -> torch.Tensor:
    """The numbers that were sent of a tensor like ``like``; none where it has none."""
    if not len(body):
        return torch.zeros_like(like)
    return torch.frombuffer(body, dtype=like.dtype)
