"""Stops async segments in the middle of an epoch: rank 0 decides, and tells all ranks to stop.

Every rank sends rank 0 the loss and the seconds of each step, if the guard or the straggler policy
needs them. In a script with collectives of its own, ranks are at about the same step, and must all
stop at the same one. Suppose rank 0 has received step n at most when it orders to stop after step n
+ 2. A rank that has sent step n, or none after it, can end step n + 1 without knowing of the order,
but not step n + 2: rank 0 answered its gradient, or that it has none, after it sent the order, and
messages arrive in the order in which they were sent. So no rank has begun step n + 3. The first
order of a segment counts: each later one would move the stop further away.
"""

from __future__ import annotations

import threading

from hvd_autosync.runtime.collectives.operations import size
from hvd_autosync.runtime.guard.handler import LossGuardHandler
from hvd_autosync.runtime.stragglers.policy import StragglerPolicy
from hvd_autosync.runtime.sync.asynchronous import Asynchronous, PeerMessage

#: Kinds of messages: a rank's report of a step to rank 0; rank 0's order to stop at a later step.
_STEP, _STOP = "step", "stop"
#: Steps from the highest that rank 0 has received to the one at which all stop.
_NOTICE = 2


class Stopping:
    """One rank's part, shared by two threads: the one that trains, and the one of messages.

    During steps without a barrier all that both use is used under a lock here: the order, the
    reports and the straggler policy. The guard has a lock of its own.

    Args:
        guard_handler: Judges losses.
        stragglers: Knows whether there still is a straggler.
    """

    def __init__(self, guard_handler: LossGuardHandler, stragglers: StragglerPolicy) -> None:
        self._lock = threading.Lock()
        self._broken = False
        self._guard_handler = guard_handler
        self._stragglers = stragglers
        self._size = size()  # messages arrive in another thread
        #: The order of the last segment that had one.
        self._order: PeerMessage | None = None
        #: On rank 0: the segment of the last report, and the highest step of any rank in it.
        self._reported = 0, 0

    @property
    def broken(self) -> bool:
        """On rank 0: whether a loss was not healthy."""
        with self._lock:
            return self._broken

    @property
    def straggler_present(self) -> bool:
        """Whether a straggler is known to be there."""
        with self._lock:
            return self._stragglers.present

    @straggler_present.setter
    def straggler_present(self, present: bool) -> None:
        with self._lock:
            self._stragglers.present = present

    def stepped(self, asynchronous: Asynchronous, computed_s: float) -> bool:
        """Count and report a step of this rank; return whether it is to stop now."""
        segment, clock = asynchronous.segment, asynchronous.clock
        with self._lock:
            order, slow = self._order, self._stragglers.present
        loss = self._guard_handler.loss()
        if slow or self._guard_handler.watches:
            message = {"kind": _STEP, "segment": segment, "clock": clock}
            asynchronous.send(0, {**message, "loss": loss, "seconds": computed_s})
        return order is not None and order["segment"] == segment and clock >= order["clock"]

    def on_message(self, asynchronous: Asynchronous, source: int, message: PeerMessage) -> None:
        """Handle a message, in the service thread."""
        if message["kind"] == _STOP:
            with self._lock:
                if self._order is None or self._order["segment"] != message["segment"]:
                    self._order = message
            return
        loss = message["loss"]
        broken = loss is not None and not self._guard_handler.healthy(loss)
        with self._lock:
            if message["segment"] != self._reported[0]:
                self._reported = message["segment"], 0
            highest = max(self._reported[1], message["clock"])
            self._reported = message["segment"], highest
            self._broken = self._broken or broken
            recovered = self._stragglers.stepped(source, message["seconds"])
        if recovered or broken:
            order = {"kind": _STOP, "segment": message["segment"], "clock": highest + _NOTICE}
            for each in range(self._size):
                asynchronous.send(each, order)
