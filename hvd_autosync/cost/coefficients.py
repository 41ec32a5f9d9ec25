"""What the cost model takes for granted, and the factors by which trials correct it."""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds of one pass of a processor over a byte of memory.
PASS_S_PER_BYTE = 2.5e-10
#: Seconds of a host for each tensor or bucket that it sends, for its own sake.
ITEM_S = 3e-5
#: Seconds of a step outside of forward, backward and communication: the optimizer's, mostly.
REST_S = 1e-3
#: Seconds that a second of communication behind backward adds to it. Processors do both, and what
#: sends also wakes and waits: chosen on five tables of 2026-11-22, most of
#: which were measured anew since (``benchmarks/traces``). For accelerators it is
#: a guess.
CONTENTION = {"cpu": 1.5, "accelerator": 0.1}
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
        contention: On what communication behind backward adds to it.
        rest: On the seconds outside of all this.
    """

    latency: float = 0.0
    byte: float = 0.0
    host: float = 0.0
    compute: float = 0.0
    contention: float = 0.0
    rest: float = 0.0


UNCALIBRATED = Coefficients()
