"""Sends gradients off in buckets as they arrive in backward, and waits for all before the step."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from horovod.torch.mpi_ops import Sum, allreduce_async_, poll, size, synchronize

from hvd_autosync.runtime.buckets import Bucket, GradientBucket
from hvd_autosync.runtime.exchanges import Steps

#: Makes the buckets, given the parameters in the order in which their gradients arrived.
MakeBuckets = Callable[[Sequence[torch.nn.Parameter]], list[Bucket]]
#: Pause between two looks at exchanges that cannot go on yet.
_PAUSE_S = 5e-5


class Dispatcher:
    """The exchanges of one optimizer's gradients.

    In the first step nothing is sent before the end: the order in which gradients arrive is not
    known yet, and buckets follow it.

    A rank that waits in ``hvd.join()`` takes part in plain allreduces only, where Horovod puts in
    zeros for it. So each step begins with a census, if any bucket needs all ranks, and while some
    are missing everything travels by plain allreduces.

    Args:
        name: Tells the operations of this dispatcher from those of others; equal on all ranks.
        make_buckets: Called once, at the end of the first step, on all ranks.
        plain: Buckets that need nothing but plain allreduces, for first steps without some rank.
        absence: Called when some rank does not take part in a step, before anything is sent in it.

    Attributes:
        buckets: All of them, from the end of the first step with all ranks on.
    """

    def __init__(
        self, name: str, make_buckets: MakeBuckets, plain: list[Bucket],
        absence: Callable[[], None],
    ) -> None:  # fmt: skip
        self._make_buckets = make_buckets
        self._plain = plain
        self._absence = absence
        self._first_arrivals: list[torch.nn.Parameter] = []
        self.buckets: list[Bucket] = []
        self._of: dict[torch.nn.Parameter, list[Bucket]] = {}
        self._ready: deque[Bucket] = deque()
        #: Operations after which nothing is left to do; exchanges of one operation, and of
        #: several that follow each other.
        self._handles: list[int] = []
        self._single: deque[_UnderWay] = deque()
        self._staged: deque[_UnderWay] = deque()
        self._census = _Census(name)
        self._codec_states: dict[str, dict[str, torch.Tensor]] = {}
        # Backward runs hooks in one thread for each device.
        self._lock = threading.RLock()

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
            self._census.begin()
            self._start_ready(wait=False)
            if self._staged and poll(self._staged[0][0]):
                self._advance(self._staged)

    def finish(self) -> None:
        """Send what was not sent yet, and wait until every gradient is the same on all ranks."""
        with self._lock:
            self._census.begin()
            buckets = self.buckets or self._first_buckets()
            self._ready.extend(b for b in buckets if not b.started and b.missing > 0)
            self._start_ready(wait=True)
            self._finish_staged()
            for handle in self._handles:
                synchronize(handle)
            self._handles.clear()
            while self._single:
                self._advance(self._single)
            self._rest(buckets)

    def finish_if_started(self) -> None:
        """The same, if anything has arrived in this step, which is so on all ranks or on none."""
        with self._lock:
            if any(bucket.missing < len(bucket.parameters) for bucket in self.buckets):
                self.finish()

    def run(self, exchanges: Iterable[Steps]) -> None:
        """Begin exchanges, and wait until all are done."""
        with self._lock:
            for steps in exchanges:
                self._begin(steps, self._staged)
            self._finish_staged()

    @property
    def busy(self) -> bool:
        """Whether anything was sent in this step, and its end is still to come."""
        return any(bucket.started for bucket in self.buckets)

    def codec_states(self) -> dict[str, dict[str, torch.Tensor]]:
        """What codecs carry from step to step on this rank, by bucket."""
        states = {b.name: b.codec.state() for b in self.buckets if b.codec is not None}
        return {name: state for name, state in states.items() if state} or self._codec_states

    def load_codec_states(self, states: dict[str, dict[str, torch.Tensor]]) -> None:
        """Take over what :meth:`codec_states` returned, now or as soon as there are buckets."""
        self._codec_states = states
        for bucket in self.buckets:
            if bucket.codec is not None:
                bucket.codec.load(states.get(bucket.name, {}))

    def _first_buckets(self) -> list[Bucket]:
        if not self._census.all_here(wait=True):
            return self._plain
        self.buckets = self._make_buckets(list(dict.fromkeys(self._first_arrivals)))
        self._first_arrivals.clear()
        self._census.needed = any(bucket.needs_all for bucket in self.buckets)
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                self._of.setdefault(parameter, []).append(bucket)
        if self._codec_states:
            self.load_codec_states(self._codec_states)
        return self.buckets

    def _rest(self, buckets: list[Bucket]) -> None:
        self._census.rest()
        for bucket in buckets:
            bucket.rest()

    def _start_ready(self, *, wait: bool) -> None:
        all_here = self._census.all_here(wait=wait) if self._ready else None
        if all_here is None:
            return
        if not all_here and not self.busy:
            self._absence()
        while self._ready:
            bucket = self._ready.popleft()
            bucket.started = True
            if isinstance(bucket, GradientBucket):
                self._handles.append(bucket.start())
                continue
            steps = bucket.send() if all_here else bucket.send_plainly()
            self._begin(steps, self._staged if bucket.needs_all else self._single)

    @staticmethod
    def _begin(steps: Steps, queue: deque[_UnderWay]) -> None:
        handle = next(steps, None)
        if handle is not None:
            queue.append((handle, steps))

    def _finish_staged(self) -> None:
        """Let each go on as soon as it can.

        Waiting for one of them would be wrong while there are others: where ranks began in
        different orders, what one waits for may wait for the next operation of another.
        """
        while self._staged:
            before = len(self._staged)
            done = [entry for entry in self._staged if before == 1 or poll(entry[0])]
            if not done:
                time.sleep(_PAUSE_S)
                continue
            self._staged = deque(entry for entry in self._staged if entry not in done)
            for entry in done:
                self._staged.appendleft(entry)
                self._advance(self._staged)

    def _advance(self, queue: deque[_UnderWay]) -> None:
        """Wait for the operation at the head of ``queue``, and let its exchange go on."""
        handle, steps = queue.popleft()
        output = synchronize(handle)
        try:
            queue.append((steps.send(output), steps))
        except StopIteration:
            pass


#: The handle of an exchange's running operation, and the exchange.
_UnderWay = tuple[int, Steps]


class _Census:
    """Counts in each step which ranks take part in it.

    Args:
        name: Of whom it is.

    Attributes:
        needed: Whether it matters who does.
    """

    def __init__(self, name: str) -> None:
        self.needed = True
        self._name = f"hvd_autosync.census.{name}"
        self._count = torch.ones(1)
        self._handle: int | None = None
        self._all_here: bool | None = None

    def begin(self) -> None:
        """This rank is about to take part: from here on it makes the whole step."""
        if self.needed and self._handle is None and self._all_here is None:
            self._count.fill_(1)
            self._handle = allreduce_async_(self._count, name=self._name, op=Sum)

    def all_here(self, *, wait: bool) -> bool | None:
        """Whether all ranks take part; ``None`` while it is not known."""
        if not self.needed:
            return True
        if self._handle is not None and (wait or poll(self._handle)):
            self._all_here = bool(synchronize(self._handle).item() == size())
            self._handle = None
        return self._all_here

    def rest(self) -> None:
        """Be ready for the next step."""
        if self._handle is not None:
            synchronize(self._handle)
        self._handle = self._all_here = None
