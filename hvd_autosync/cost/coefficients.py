"""Constants of the cost model, and the factors by which trials correct them."""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds of one pass over a byte of memory, on a processor.
PASS_S_PER_BYTE = 2.5e-10
#: The seconds of a pass over a gradient on its device, as a share of those on a processor. For
#: accelerators it is a ratio of memory bandwidths of data sheets (about 1 TB/s to 5 GB/s of a
#: core), not measured by us.
DEVICE_SHARE = {"cpu": 1.0, "accelerator": 0.005}
#: Seconds of host work for each tensor or bucket that is sent, whatever its size.
ITEM_S = 3e-5
#: Seconds of a step outside of forward, backward and communication: mostly the optimizer.
REST_S = 1e-3
#: Contention: seconds that a second of communication overlapped with forward or backward adds to
#: it. Processors do both, and sending also wakes up and waits. Chosen on five tables of 2026-11-22,
#: most of which have been measured again since (``benchmarks/traces``). For accelerators it is a
#: guess.
CONTENTION = {"cpu": 1.5, "accelerator": 0.1}
#: Seconds for which one cycle of Horovod's background loop keeps a processor busy, with or without
#: ready tensors: ranks coordinate the response cache (``CoordinateCacheAndState`` in
#: ``horovod/common/controller.cc``). Measured on two idle ranks: 0.12 to 0.17 ms per cycle at cycle
#: times of 1 to 5 ms, and a fifth of the time at 0.1 and 0.2 ms. There the next cycle starts as
#: soon as the ranks have agreed: after the second number as a share of an operation without bytes.
CYCLE_BUSY_S, COORDINATION_SHARE = 1.25e-4, 0.4
#: Factor on the latency of an operation whose response is negotiated instead of cached.
UNCACHED = 1.5


@dataclass(frozen=True)
class Coefficients:
    """Logarithms of the factors on parts of a step; their prior means are 0.

    Attributes:
        latency: Factor on the seconds of an operation without its bytes.
        byte: Factor on the seconds of a byte on the wire.
        host: Factor on the seconds of work on gradients in memory: copies, sums, codecs.
        compute: Factor on forward and backward, such as for a machine that was busier while the
            model was profiled.
        contention: Factor on the time that communication and the cycles of Horovod's background
            loop add to computation.
        rest: Factor on the remaining seconds.
    """

    latency: float = 0.0
    byte: float = 0.0
    host: float = 0.0
    compute: float = 0.0
    contention: float = 0.0
    rest: float = 0.0


UNCALIBRATED = Coefficients()
