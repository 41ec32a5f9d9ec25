"""Exchanges gradients in buckets as they arrive in backward, and waits for all before the step."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from hvd_autosync.runtime.collectives.operations import Collectives, Sum, collectives
from hvd_autosync.runtime.exchange.buckets import Bucket, FlatBucket, GradientBucket
from hvd_autosync.runtime.exchange.changed_gradients import ChangedGradients
from hvd_autosync.runtime.exchange.codecs import LEFT_OUT
from hvd_autosync.runtime.exchange.exchanges import Steps

_LOG = logging.getLogger(__name__)
#: Makes the buckets from the parameters, in the order in which their gradients arrived.
MakeBuckets = Callable[[Sequence[torch.nn.Parameter]], list[Bucket]]
#: Pause between two polls of exchanges that cannot continue yet.
_PAUSE_S = 5e-5
#: In priority order, the most bytes in flight during backward.
_UNDER_WAY_BYTES = 4 * 1024 * 1024


class Dispatcher:
    """The exchanges of one optimizer's gradients.

    In the first step nothing is sent before its end: buckets follow the order in which gradients
    arrive, which is not known yet.

    A rank that waits in ``hvd.join()`` takes part in plain allreduces only, where Horovod
    substitutes zeros for it. So if any bucket needs all ranks, each step begins with a
    participation check, and while some ranks are missing all gradients are exchanged by plain
    allreduces.

    Args:
        name: Distinguishes the operations of this dispatcher from those of others; equal on all
            ranks.
        make_buckets: Called once, at the end of the first step, on all ranks.
        plain: Buckets that use plain allreduces only, for first steps without some rank.
        absence: Called if some rank does not take part in a step, before anything is sent in it.
        priority: Send first what arrives last, and hold back the rest in backward: the next forward
            needs the gradients of the first layers first.

    Attributes:
        buckets: All buckets, once the first step with all ranks has ended.
        hold: Whether nothing is sent before :meth:`finish`; ranks may differ in it.
        changes: Is told what exchanges write into gradients, if it is to be noticed what else does.
    """

    def __init__(
        self,
        name: str,
        make_buckets: MakeBuckets,
        plain: list[Bucket],
        absence: Callable[[], None],
        *,
        priority: bool = False,
    ) -> None:
        # Backward runs hooks in one thread for each device.
        self._lock = threading.RLock()
        self._collectives = collectives()
        self._make_buckets = make_buckets
        self._plain = plain
        self._absence = absence
        self._priority = priority
        self._first_arrivals: list[torch.nn.Parameter] = []
        self.buckets: list[Bucket] = []
        self.hold = False
        self.changes: ChangedGradients | None = None
        self._of: dict[torch.nn.Parameter, list[Bucket]] = {}
        self._place: dict[Bucket, int] = {}
        self._ready: list[Bucket] = []
        #: Exchanges of a single operation, which need no further action, and exchanges of several
        #: operations in sequence.
        self._single: dict[Bucket, tuple[int, Steps | None]] = {}
        self._staged: deque[tuple[int, Steps]] = deque()
        self._participation = _ParticipationCheck(name, self._collectives)
        self._codec_states: dict[str, dict[str, torch.Tensor]] = {}
        self._codecs_dropped = False

    def arrived(self, parameter: torch.nn.Parameter) -> None:
        """The gradient of ``parameter`` is complete."""
        with self._lock:
            if not self.buckets:
                self._first_arrivals.append(parameter)
                return
            for bucket in self._of[parameter]:
                bucket.missing -= 1
                if bucket.missing == 0 and not bucket.started:
                    self._ready.append(bucket)
            if self.hold:
                return
            if self._participation.needed:
                self._participation.begin()
            if self._ready:
                self._start_ready(wait=False)
            if self._staged and self._collectives.poll(self._staged[0][0]):
                self._advance()

    def finish(self, deferred: Collection[Bucket] = ()) -> None:
        """Send what was not sent yet, and wait until every gradient is the same on all ranks.

        Args:
            deferred: Buckets that :meth:`finish_deferred` waits for later; all are ``deferrable``.
        """
        with self._lock:
            self._participation.begin()
            buckets = self.buckets or self._first_buckets()
            self._ready.extend(b for b in buckets if not b.started and b.missing > 0)
            if self._ready:
                self._start_ready(wait=True)
            self._finish_staged()
            for bucket in [b for b in self._single if b not in deferred]:
                self.finish_deferred(bucket)
            self._reset(buckets)

    def finish_deferred(self, bucket: Bucket) -> None:
        """Wait for the exchange of one bucket."""
        with self._lock:
            handle, steps = self._single.pop(bucket)
            output = self._collectives.synchronize(handle)
            if steps is not None:
                with contextlib.suppress(StopIteration):
                    steps.send(output)

    def finish_if_started(self) -> None:
        """Call :meth:`finish` if anything has arrived in this step, which all ranks agree on."""
        with self._lock:
            if self.buckets and self.begun:
                self.finish()

    def close(self) -> None:
        """Let go of all buckets, whose tensors may be parts of parameters."""
        self.buckets, self._plain = [], []
        self._of, self._place, self._codec_states = {}, {}, {}

    def run(self, exchanges: Iterable[Steps]) -> None:
        """Start exchanges, and wait until all are done."""
        with self._lock:
            for steps in exchanges:
                self._begin(steps)
            self._finish_staged()

    @property
    def busy(self) -> bool:
        """Whether an exchange of this step was started, and the step has not ended."""
        return any(bucket.started for bucket in self.buckets)

    @property
    def begun(self) -> bool:
        """Whether a gradient of the next step has arrived."""
        arrived = any(bucket.missing < len(bucket.parameters) for bucket in self.buckets)
        return bool(self._first_arrivals) or arrived

    @property
    def left_outs(self) -> list[torch.Tensor]:
        """What error feedback keeps for later exchanges, by bucket; views."""
        codecs = [bucket.codec for bucket in self.buckets if bucket.codec is not None]
        return [left for codec in codecs if (left := codec.left_out()) is not None]

    def take_left_out(self) -> None:
        """Add to all gradients what error feedback has kept of them, which is then zero."""
        for bucket in self.buckets:
            if isinstance(bucket, FlatBucket):
                bucket.take_left_out()

    def drop_codecs(self) -> None:
        """Exchange all gradients uncompressed from now on."""
        self._codecs_dropped = True
        for bucket in self.buckets:
            if isinstance(bucket, FlatBucket):
                bucket.drop_codec()

    def codec_states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the states that codecs keep from step to step on this rank, by bucket.

        While there are no buckets, they are those that were loaded for them.
        """
        if not self.buckets:
            return self._codec_states
        states = {b.name: b.codec.state() for b in self.buckets if b.codec is not None}
        return {name: state for name, state in states.items() if state}

    def load_codec_states(
        self, states: dict[str, dict[str, torch.Tensor]], of_rank: int | None = None
    ) -> None:
        """Load what :meth:`codec_states` returned, now or as soon as there are buckets.

        Args:
            states: The states.
            of_rank: The rank that they are of; ``None``: this one. What error feedback of another
                rank has kept is sent by that rank, not once more by this one.
        """
        if of_rank not in (None, self._collectives.rank()):
            states = {
                bucket: {
                    name: torch.zeros_like(tensor) if name == LEFT_OUT else tensor
                    for name, tensor in state.items()
                }
                for bucket, state in states.items()
            }
        self._codec_states = {} if self.buckets else states
        for bucket in self.buckets:
            if bucket.codec is not None:
                bucket.codec.load(states.get(bucket.name, {}))

    def _first_buckets(self) -> list[Bucket]:
        if not self._participation.all_here(wait=True):
            self._first_arrivals.clear()
            return self._plain
        self.buckets = self._make_buckets(list(dict.fromkeys(self._first_arrivals)))
        self._first_arrivals.clear()
        sizes = [bucket.size_bytes for bucket in self.buckets]
        _LOG.debug("%d buckets of %d bytes", len(sizes), sum(sizes))
        self._participation.needed = any(bucket.needs_all for bucket in self.buckets)
        for place, bucket in enumerate(self.buckets):
            self._place[bucket] = place
            for parameter in bucket.parameters:
                self._of.setdefault(parameter, []).append(bucket)
        if self._codec_states:
            self.load_codec_states(self._codec_states)
        if self._codecs_dropped:
            self.drop_codecs()
        return self.buckets

    def _reset(self, buckets: list[Bucket]) -> None:
        self._participation.reset()
        for bucket in buckets:
            bucket.reset()

    def _start_ready(self, *, wait: bool) -> None:
        all_here = not self._participation.needed or self._participation.all_here(wait=wait)
        if all_here is None:
            return
        if not all_here and not self.busy:
            self._absence()
        if self._priority and self.buckets:  # the plain ones of first steps have no place
            self._ready.sort(key=self._place.__getitem__, reverse=True)
        while self._ready and (wait or not self._priority or self._room()):
            bucket = self._ready.pop(0)
            bucket.started = True
            if self.changes is not None and bucket.sent_in_place:
                self.changes.in_flight(bucket.parameters)
            if isinstance(bucket, GradientBucket):
                self._single[bucket] = (bucket.start(), None)
                continue
            steps = bucket.send() if all_here else bucket.send_plainly()
            if bucket.needs_all:
                self._begin(steps if self.changes is None else _noted(steps, bucket, self.changes))
            else:
                self._single[bucket] = (next(steps), steps)

    def _room(self) -> bool:
        """Return whether so few bytes are in flight that later gradients can overtake the rest."""
        poll = self._collectives.poll
        under_way = sum(b.size_bytes for b, (handle, _) in self._single.items() if not poll(handle))
        return under_way < _UNDER_WAY_BYTES

    def _begin(self, steps: Steps) -> None:
        handle = next(steps, None)
        if handle is not None:
            self._staged.append((handle, steps))

    def _finish_staged(self) -> None:
        """Continue each staged exchange as soon as it can.

        Waiting for one of several would be wrong: if ranks began in different orders, the one
        waited for may wait for the next operation of another.
        """
        while self._staged:
            done = self._await_any() if len(self._staged) > 1 else list(self._staged)
            self._staged = deque(entry for entry in self._staged if entry not in done)
            for entry in done:
                self._staged.appendleft(entry)
                self._advance()

    def _await_any(self) -> list[tuple[int, Steps]]:
        """Wait until an operation of a staged exchange is done; return all that then are."""
        poll = self._collectives.poll
        while not (done := [entry for entry in self._staged if poll(entry[0])]):
            time.sleep(_PAUSE_S)
        return done

    def _advance(self) -> None:
        """Wait for the first staged exchange's operation, and continue that exchange."""
        handle, steps = self._staged.popleft()
        output = self._collectives.synchronize(handle)
        with contextlib.suppress(StopIteration):
            self._staged.append((steps.send(output), steps))


def _noted(steps: Steps, bucket: Bucket, changes: ChangedGradients) -> Steps:
    """Run ``steps``, and note after each what it may have written."""
    with contextlib.suppress(StopIteration):
        handle = next(steps)
        while True:
            if bucket.sent_in_place:
                changes.in_flight(bucket.parameters)
            changes.written(bucket.parameters)
            handle = steps.send((yield handle))
    changes.written(bucket.parameters)


class _ParticipationCheck:
    """Counts in each step the ranks that take part in it.

    Args:
        name: Name of the dispatcher.
        own: The collectives.

    Attributes:
        needed: Whether any exchange depends on it.
    """

    def __init__(self, name: str, own: Collectives) -> None:
        self._collectives = own
        self.needed = True
        self._name = f"hvd_autosync.participation.{name}"
        self._count = torch.ones(1, dtype=torch.int64, device="cpu")
        self._handle: int | None = None
        self._all_here: bool | None = None

    def begin(self) -> None:
        """This rank takes part: from here on it makes the whole step."""
        if self.needed and self._handle is None and self._all_here is None:
            self._count.fill_(1)
            self._handle = self._collectives.allreduce_async_(self._count, name=self._name, op=Sum)

    def all_here(self, *, wait: bool) -> bool | None:
        """Return whether all ranks take part; ``None`` while that is not known."""
        if not self.needed:
            return True
        if self._handle is not None and (wait or self._collectives.poll(self._handle)):
            present = self._collectives.synchronize(self._handle).item()
            self._all_here = present == self._collectives.size()
            self._handle = None
        return self._all_here

    def reset(self) -> None:
        """Prepare for the next step."""
        if self._handle is not None:
            self._collectives.synchronize(self._handle)
        self._handle = self._all_here = None
