"""Ends steps without a barrier in the middle of a pass: rank 0 hears of them, and has all stop.

Every rank tells rank 0 the loss and the seconds of its step, where somebody is to judge them. Where
a script has collectives of its own ranks are about at the same step, and must not stop at
different ones. Let rank 0 have heard of step n at most when it orders to stop after step n + 2. Who
has told of step n or of none after it can end step n + 1 without knowing of the order, but not
step n + 2: rank 0's answer to the gradient of that one was sent after the order, and letters
arrive in the order in which they were sent. So nobody has begun step n + 3. The first order of a
stretch counts: with each later one the end would be further away.
"""

from __future__ import annotations

from horovod.torch.mpi_ops import size

from hvd_autosync.runtime.guard.handler import LossGuardHandler
from hvd_autosync.runtime.stragglers.policy import StragglerPolicy
from hvd_autosync.runtime.sync.asynchronous import Asynchronous, PeerMessage

#: Kinds of letters: to rank 0, what it has to know of a step; from it, to stop at a later one.
_STEP, _STOP = "step", "stop"
#: Steps from the highest that rank 0 has heard of to that at which all stop.
_NOTICE = 2


class Stopping:
    """One rank's part.

    Args:
        supervision: Judges losses.
        stragglers: Knows whether there still is one.

    Attributes:
        broken: On rank 0: whether a loss was not healthy.
    """

    def __init__(self, guard_handler: LossGuardHandler, stragglers: StragglerPolicy) -> None:
        self.broken = False
        self._guard_handler = guard_handler
        self._stragglers = stragglers
        #: The order of the last stretch that had one.
        self._told: PeerMessage | None = None
        #: On rank 0: the stretch that letters are about, and the highest step of any rank in it.
        self._heard_of = 0, 0

    def stepped(self, asynchronous: Asynchronous, computed_s: float) -> bool:
        """This rank has made a step; whether it is to stop now."""
        segment, clock = asynchronous.segment, asynchronous.clock
        told = self._told
        if told is not None and told["segment"] == segment and clock >= told["clock"]:
            return True
        loss = self._guard_handler.loss()
        if loss is not None or self._stragglers.present:
            message = {"kind": _STEP, "segment": segment, "clock": clock}
            asynchronous.tell(0, {**message, "loss": loss, "seconds": computed_s})
        return False

    def on_message(self, asynchronous: Asynchronous, source: int, message: PeerMessage) -> None:
        """Take a letter; in the thread that reads them."""
        if message["kind"] == _STOP:
            if self._told is None or self._told["segment"] != message["segment"]:
                self._told = message
            return
        if message["segment"] != self._heard_of[0]:
            self._heard_of = message["segment"], 0
        highest = max(self._heard_of[1], message["clock"])
        self._heard_of = message["segment"], highest
        loss = message["loss"]
        broken = loss is not None and not self._guard_handler.healthy(loss)
        self.broken = self.broken or broken
        if self._stragglers.stepped(source, message["seconds"]) or broken:
            order = {"kind": _STOP, "segment": message["segment"], "clock": highest + _NOTICE}
            for each in range(size()):
                asynchronous.tell(each, order)
