"""What the cost model takes for granted, and the factors by which trials correct it."""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds of one pass of a processor over a byte of memory.
PASS_S_PER_BYTE = 2.5e-10
#: Seconds of a host for each tensor or bucket that it sends, for its own sake.
ITEM_S = 3e-5
#: Seconds of a step outside of forward, backward and communication: the optimizer's, mostly.
REST_S = 1e-3
#: Seconds that a second of communication behind forward or backward adds to it. Processors do
#: both, and what sends also wakes and waits: chosen on five tables of 2026-11-22, most of
#: which were measured anew since (``benchmarks/traces``). For accelerators it is
#: a guess.
CONTENTION = {"cpu": 1.5, "accelerator": 0.1}
#: Seconds for which a look of Horovod's loop keeps a processor busy, whether it finds anything or
#: not: ranks tell each other what they have (``CoordinateCacheAndState`` in
#: ``horovod/common/controller.cc``). Two idle ranks were measured: 0.12 to 0.17 ms per look at
#: cycles of 1 to 5 ms, and a fifth of the time at 0.1 and 0.2 ms, where looks follow each other as
#: soon as ranks have agreed: after this share of an operation without bytes.
LOOK_S, LOOKING_SHARE = 1.25e-4, 0.4
#: An operation costs so much more when its response is negotiated anew instead of remembered.
UNCACHED = 1.5


@dataclass(frozen=True)
class Coefficients:
    """Logarithms of factors; 0 everywhere is what is believed before any trial.

    Attributes:
        latency: On the seconds of an operation without its bytes.
        byte: On the seconds of a byte on the wire.
        host: On the seconds of work on gradients in memory: copies, sums, codecs.
        compute: On forward and backward, as of a machine that was busier when it was profiled.
        contention: On what communication and looks of Horovod's loop add to computation.
        rest: On the seconds outside of all this.
    """

    latency: float = 0.0
    byte: float = 0.0
    host: float = 0.0
    compute: float = 0.0
    contention: float = 0.0
    rest: float = 0.0


UNCALIBRATED = Coefficients()
