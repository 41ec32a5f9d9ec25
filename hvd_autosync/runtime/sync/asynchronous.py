"""Steps without a barrier: ranks push gradients to parameter servers and pull parameters.

Every rank is a server of its shards. A rank pushes the gradient of a bucket as soon as it is
complete in backward, to each server its share. The server makes a step of it
(:mod:`hvd_autosync.runtime.sync.parameter_server`) and answers with its current parameters. Before
the next forward the rank waits for the answers to its own pushes, and for nothing else.

Such steps form async segments, between points at which all ranks stop together::

    begin | push, pull, push, pull, ... drain | refresh, next segment | push, pull, ... drain | end
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.collectives.agreement import agree_order
from hvd_autosync.runtime.collectives.messaging import open_endpoint
from hvd_autosync.runtime.collectives.operations import rank, size
from hvd_autosync.runtime.collectives.warn_once import warn_on_rank_0
from hvd_autosync.runtime.exchange.changed_gradients import HELD, ChangedGradients
from hvd_autosync.runtime.state.optimizer_states import OptimizerStates
from hvd_autosync.runtime.state.states import encode_entries, parameters_of
from hvd_autosync.runtime.sync.parameter_server import ParameterServer, Push
from hvd_autosync.runtime.sync.shards import ServerBucket, Share, make_buckets
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.util.weak_methods import once_gone, weakly

#: Kinds of messages: a gradient; that a skipped step has none; no more steps in this segment; a
#: request for parameters; parameters.
_PUSH, _SKIP, _DRAIN, _PULL, _PULLED = "push", "skip", "drain", "pull", "pulled"
#: Seconds between two checks whether the other ranks are still there, while waiting for answers.
_LOOK_S = 0.2
#: First steps of a segment, and interval of later ones, in which all parameters are compared with
#: what their servers sent; in other steps only those that torch has seen written to.
_CHECKED, _CHECK_EVERY = 2, 64

PeerMessage = dict[str, Any]


class Asynchronous:
    """Steps without a barrier of one optimizer; creating it is a collective.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        optimizer: Horovod's optimizer, of our class.
        protocol: ASP or SSP, with its rules for learning rate and momentum.
        summed: Whether learning rates fit the sum of all ranks' gradients rather than their mean.
        order: All parameters, in the order in which their gradients arrive on this rank.
        on_message: Called with messages of other kinds and their source rank, in the service
            thread.

    Attributes:
        clock: This rank's steps in this segment.
        segment: Number of the segment, from 1.
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
        self._on_other_message = on_message
        parameters = parameters_of(optimizer)
        #: Parameter -> its place in the optimizer, whose groups are empty during its step.
        self._places = {parameter: index for index, parameter in enumerate(parameters)}
        agreed = agree_order([self._places[each] for each in order], f"asynchronous.{name}")
        self._buckets = make_buckets(optimizer, [parameters[index] for index in agreed], size())
        self._of = {each: bucket for bucket in self._buckets for each in bucket.parameters}
        self._missing: dict[ServerBucket, set[torch.nn.Parameter]] = {}
        #: Bucket and owner -> version of the parameters that this rank has.
        self._versions: dict[tuple[int, int], int] = {}
        self._server: ParameterServer | None = None
        self.segment = 0
        self._awaited = 0
        #: Whether nothing is pushed before the end of a step, as in the first one.
        self._holds = True
        #: Notices what the script changes between backward and the step; ``None``: it does.
        self._changes: ChangedGradients | None = ChangedGradients(with_bits=True)
        #: What the optimizer has instead of the states that are with the servers.
        self._left = OptimizerStates()
        #: Segment and clock of the step that has begun.
        self._begun = 0, 0
        #: Guards what the service thread changes: the server, versions, and answers awaited.
        self._changed = threading.Condition()
        # The service thread must not keep an optimizer that the script has dropped.
        self._endpoint = open_endpoint(f"asynchronous.{name}", weakly(self._on_message))
        #: Closes the endpoint once all ranks have called it, or dropped the optimizer.
        self.close = once_gone(optimizer, self._endpoint.close_in_background)

    @property
    def _optimizer(self) -> Any:
        optimizer = self._of_optimizer()
        assert optimizer is not None, "its owner is alive"
        return optimizer

    @property
    def staleness(self) -> dict[int, int]:
        """Staleness of this rank's shards, as of :class:`ParameterServer`."""
        with self._changed:
            return {} if self._server is None else dict(self._server.staleness)

    def begin(self) -> None:
        """Begin the first segment; on all ranks, with equal parameters and states."""
        for bucket in self._buckets:
            bucket.keep_parameters()
        shares = [Share(bucket, rank(), self._optimizer) for bucket in self._buckets]
        for parameter in self._of:
            self._optimizer.state.pop(parameter, None)
        self._left = OptimizerStates.put_into(self._optimizer)
        with self._changed:
            self._versions.clear()
            self._server = ParameterServer(shares, size(), self._protocol, summed=self._summed)
        self.begin_next_segment()

    def begin_next_segment(self) -> None:
        """Begin another segment from the servers' parameters; on all ranks, once all drained."""
        assert self._server is not None, "it has begun"
        with self._changed:
            self._server.begin_segment()
            self.segment += 1
            self._changed.notify_all()
        self.clock = 0
        self._expect_gradients()

    def end(self) -> None:
        """Give up the shards and their states; on all ranks, after all have drained."""
        with self._changed:
            self._server = None

    def send(self, to: int, message: PeerMessage) -> None:
        """Send a message of another kind, named by its ``kind``."""
        self._endpoint.send(to, json.dumps(message).encode())

    def check(self) -> None:
        """Raise what has failed.

        Raises:
            AutosyncError: Another rank is gone, or failed to handle a message.
        """
        self._endpoint.check()

    def arrived(self, parameter: torch.nn.Parameter) -> None:
        """A gradient is complete; its bucket is pushed when all of its gradients are.

        Not where the script changes gradients before the step: then it is pushed there.
        """
        bucket = self._of[parameter]
        with self._changed:
            self._begin_step()
            if self._changes is not None and parameter.grad is not None:
                self._changes.note(parameter, parameter.grad)
        if self._holds:
            return
        bucket.keep_gradient(parameter)
        with self._changed:  # backward runs hooks in one thread for each device
            missing = self._missing[bucket]
            missing.discard(parameter)
            complete = not missing
        if complete:
            self._push(bucket, ())

    def exchange(self, *, skipped: bool = False) -> None:
        """Push what was not pushed of this step, then take over the servers' parameters.

        Args:
            skipped: Whether no step is made of the gradients: then nothing more is pushed.

        Raises:
            AutosyncError: As of :meth:`check`.
            ConfigurationError: The script has changed parameters or states itself.
        """
        self._begin_step()
        self._notice_changes()
        for bucket, missing in self._missing.items():
            if missing and skipped:
                self._ask(bucket, {"kind": _SKIP, "clock": self.clock + 1})
            elif missing:
                for parameter in missing:
                    bucket.keep_gradient(parameter)
                absent = [i for i, each in enumerate(bucket.parameters) if each.grad is None]
                self._push(bucket, absent)
        self._take_answers()
        self.clock += 1
        self._expect_gradients()

    def drain(self) -> None:
        """Tell all servers that this rank has made its last step of this segment.

        Raises:
            ConfigurationError: As of :meth:`exchange`.
        """
        if self._begun != (self.segment, self.clock):  # else a step has found it
            self._check_unchanged(everything=True)
        for owner in range(size()):
            self._send(owner, {"kind": _DRAIN})

    def await_drained(self) -> None:
        """Wait until all messages of this segment have arrived, except those of :meth:`refresh`.

        Raises:
            AutosyncError: As of :meth:`check`.
        """
        assert self._server is not None, "it has begun"
        with self._changed:
            while not self._server.all_drained:
                self._changed.wait(_LOOK_S)
                self._endpoint.check()

    def refresh(self) -> None:
        """Pull all parameters: they are equal on all ranks if all have drained.

        Raises:
            AutosyncError: As of :meth:`check`.
        """
        for bucket in self._buckets:
            self._ask(bucket, {"kind": _PULL})
        self._take_answers()

    def encoded_states(self) -> bytes:
        """Return the optimizer states of this rank's shards, as between two steps, encoded."""
        with self._changed:  # entries are not copies
            shares = [] if self._server is None else self._server.shares
            return encode_entries([e for share in shares for e in share.entries(self._places)])

    def _begin_step(self) -> None:
        """Check the parameters before the first push of a step.

        Pulled ones may arrive from then on.

        Raises:
            ConfigurationError: The script itself has changed parameters or states, which would be
                lost.
        """
        if self._begun == (self.segment, self.clock):
            return
        self._begun = self.segment, self.clock
        everything = self.clock < _CHECKED or self.clock % _CHECK_EVERY == 0
        self._check_unchanged(everything=everything)

    def _check_unchanged(self, *, everything: bool) -> None:
        """Check that the script itself has changed no states, and no parameters.

        Of these all are compared, or those that were written to.
        """
        for bucket in self._buckets:
            if (everything or bucket.moved()) and not bucket.untouched():
                raise ConfigurationError(
                    "the script has changed parameters itself, for example by clamp_() or "
                    "load_state_dict(), during steps without a barrier: the change would be lost",
                    hint="Leave the protocol knobs out of the strategy of this script.",
                )
        if self._left.reset_in(self._optimizer):
            raise ConfigurationError(
                "the script has cleared or replaced the states of its optimizer, which are with "
                "their owners, during steps without a barrier: that would be lost",
                hint="Leave the protocol knobs out of the strategy of this script.",
            )

    def _notice_changes(self) -> None:
        """Push nothing before a step from now on if the script changes gradients before it."""
        if self._changes is None:
            return
        self._holds = self._changes.found()
        self._changes.clear()
        self._changes.with_bits = False
        if self._holds:
            self._changes = None
            warn_on_rank_0(HELD)

    def _expect_gradients(self) -> None:
        self._missing = {bucket: set(bucket.parameters) for bucket in self._buckets}

    def _push(self, bucket: ServerBucket, absent: Sequence[int]) -> None:
        self._missing[bucket] = set()
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        head = {"kind": _PUSH, "clock": self.clock + 1, "rates": rates, "absent": absent}
        self._ask(bucket, head, bucket.flat)

    def _ask(
        self, bucket: ServerBucket, head: PeerMessage, flat: torch.Tensor | None = None
    ) -> None:
        """Send to each owner a message that it answers with its parameters."""
        with self._changed:
            self._awaited += size()
            versions = [self._versions.get((bucket.number, each), -1) for each in range(size())]
        for owner, version in enumerate(versions):
            body = None if flat is None else bucket.partition.share(owner, flat)
            self._send(owner, {**head, "bucket": bucket.number, "version": version}, body)

    def _send(self, to: int, head: PeerMessage, body: torch.Tensor | None = None) -> None:
        text = json.dumps({**head, "segment": self.segment}).encode()
        self._endpoint.send(to, text, None if body is None else _memory(body))

    def _take_answers(self) -> None:
        with self._changed:
            while self._awaited:
                self._changed.wait(_LOOK_S)
                self._endpoint.check()
        for bucket in self._buckets:
            bucket.take_pulled()

    # The methods below are called in the service thread.

    def _on_message(self, source: int, head: bytes, body: memoryview) -> None:
        message = json.loads(head)
        kind = message["kind"]
        if kind == _PULLED:
            self._on_pulled_message(source, message, body)
        elif kind in (_PUSH, _SKIP, _DRAIN, _PULL):
            with self._changed:
                while message["segment"] > self.segment:
                    self._changed.wait()  # this rank is about to begin it too
                self._on_message_as_owner(source, message, body)
        else:
            self._on_other_message(source, message)

    def _on_message_as_owner(self, source: int, message: PeerMessage, body: memoryview) -> None:
        owned = self._server
        assert owned is not None, "owners receive nothing after the last segment"
        kind = message["kind"]
        if kind == _PULL:
            self._answer(source, message["bucket"], message["version"])
            return
        if kind == _DRAIN:
            ready = owned.drained(source)
        else:
            push = Push(
                source,
                message["bucket"],
                message["clock"],
                message["version"],
                message.get("rates", ()),
                message.get("absent", ()),
            )
            if kind == _SKIP:
                ready = owned.skipped(push)
            else:
                gradient = _tensor(body, owned.shares[push.bucket].values)
                ready = owned.pushed(push, gradient)
        for each in ready:
            self._answer(each.source, each.bucket, each.version)
        if owned.all_drained:
            self._changed.notify_all()

    def _answer(self, to: int, bucket: int, version: int) -> None:
        """Send this rank's share, without values if the asking rank has this version."""
        assert self._server is not None, "called with it"
        share = self._server.shares[bucket]
        # A copy: the next gradient may come before this is sent.
        values = None if version == share.version else share.values.clone()
        self._send(to, {"kind": _PULLED, "bucket": bucket, "version": share.version}, values)

    def _on_pulled_message(self, owner: int, message: PeerMessage, body: memoryview) -> None:
        number = message["bucket"]
        with self._changed:
            self._versions[number, owner] = message["version"]
            if len(body):
                bucket = self._buckets[number]
                place = bucket.partition.share(owner, bucket.pulled)
                place.copy_(_tensor(body, place))
            self._awaited -= 1
            if not self._awaited:
                self._changed.notify_all()


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, whatever its type."""
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _tensor(body: memoryview, like: torch.Tensor) -> torch.Tensor:
    """Return the received values of a tensor like ``like``; zeros if ``body`` is empty."""
    if not len(body):
        return torch.zeros_like(like)
    return torch.frombuffer(body, dtype=like.dtype)
