"""The protocols of a training: BSP for a share of the work, then ASP or SSP (Sync-Switch).

Under BSP all ranks make each step together. Under ASP (asynchronous parallel) each rank sends its
gradient to the owners of the parameters, pulls their present parameters and does not wait. Under
SSP(s) (stale synchronous parallel, Ho et al., NeurIPS 2013) it is at most s steps ahead of the
slowest rank. Sync-Switch (Li et al., ICDCS 2021) trains the first share of the work under BSP and
the rest under ASP, with the learning rate divided by the number of ranks and momentum kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_autosync.errors import SpaceError

#: The momentum coefficient in a phase without a barrier: unchanged; zero; divided by the number of
#: ranks; first divided, then rising linearly to the unchanged one.
MOMENTUM_MODES = ("kept", "zero", "scaled", "ramped")

#: The reaction to a straggler under BSP: nothing; no barrier while it is slow; exclude it until the
#: end of the epoch; batch sizes in proportion to the ranks' speed.
STRAGGLER_POLICIES = ("none", "greedy", "elastic", "balance")

#: Without a barrier: most bytes of a bucket, and least number of buckets of a large enough model.
_MOST_BYTES, _FEWEST = 4 * 1024 * 1024, 8
#: Least bytes of a bucket; a smaller one costs more in messages than its overlap saves.
_LEAST_BYTES = 64 * 1024


def push_count(size_bytes: int) -> int:
    """Return the number of buckets in which ``size_bytes`` of gradients are sent to owners."""
    return max(-(-size_bytes // _MOST_BYTES), min(_FEWEST, size_bytes // _LEAST_BYTES), 1)


@dataclass(frozen=True)
class Protocol:
    """The protocols of one training.

    Attributes:
        kind: The protocol beside BSP: ``asp`` or ``ssp``.
        staleness: Under SSP, most steps by which a rank may be ahead of the slowest.
        share: Share of the work, in samples, under BSP; 1: all of it.
        async_first: Whether the phase without a barrier comes before BSP instead of after it.
        rate: The learning rate without a barrier: ``divided`` by the number of ranks, or ``kept``.
        momentum: One of :data:`MOMENTUM_MODES`.
        stragglers: One of :data:`STRAGGLER_POLICIES`.
        total: Number of samples of the whole training, of all ranks together; 0: unknown.

    Raises:
        SpaceError: A value is invalid.
    """

    kind: str = "asp"
    staleness: int = 2
    share: float = 0.0
    async_first: bool = False
    rate: str = "divided"
    momentum: str = "kept"
    stragglers: str = "none"
    total: int = 0

    def __post_init__(self) -> None:
        for name, wrong, wanted in (
            ("kind", self.kind not in ("asp", "ssp"), "asp or ssp"),
            ("staleness", self.staleness < 0, "at least 0"),
            ("share", not 0 <= self.share <= 1, "from 0 to 1"),
            ("rate", self.rate not in ("divided", "kept"), "divided or kept"),
            ("momentum", self.momentum not in MOMENTUM_MODES, ", ".join(MOMENTUM_MODES)),
            (
                "stragglers",
                self.stragglers not in STRAGGLER_POLICIES,
                ", ".join(STRAGGLER_POLICIES),
            ),
            ("total", self.total < 0, "at least 0"),
        ):
            if wrong:
                raise SpaceError(
                    f"invalid {name}={getattr(self, name)!r} of a protocol",
                    hint=f"It must be {wanted}.",
                )

    @property
    def needs_total(self) -> bool:
        """Whether the switch between protocols needs the total number of samples."""
        return 0 < self.share < 1

    def synchronous(self, samples: int) -> bool:
        """Return whether BSP holds after ``samples`` samples of all ranks.

        It holds if the total is needed and unknown.
        """
        if not self.needs_total:
            return self.share == 1
        if not self.total:
            return True
        first = 1 - self.share if self.async_first else self.share
        return (samples < math.ceil(first * self.total)) != self.async_first

    def momentum_factor(self, steps: int, ranks: int, ramp: int) -> float:
        """Return the factor of the momentum coefficient without a barrier.

        Args:
            steps: Number of a rank's steps since the switch.
            ranks: The number of ranks.
            ramp: Number of steps until ``ramped`` reaches the unchanged coefficient.
        """
        if self.momentum == "kept":
            return 1.0
        if self.momentum == "zero":
            return 0.0
        if self.momentum == "scaled":
            return 1 / ranks
        return (1 + (ranks - 1) * min(steps / ramp, 1.0)) / ranks
