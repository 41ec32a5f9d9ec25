"""Whether ranks wait for each other: BSP for a share of the work, then ASP or SSP (Sync-Switch).

Under BSP all ranks make a step together. Under ASP (asynchronous parallel) each rank sends its
gradient to the owners of the parameters, takes theirs as they are, and waits for nobody; under
SSP(s) (stale synchronous parallel, Ho et al., NeurIPS 2013) it is at most s steps ahead of the
slowest. Sync-Switch (Li et al., ICDCS 2021) trains the first share of the work under BSP and the
rest under ASP, where the learning rate is divided by the number of ranks, and momentum is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.knobs import Value

#: What a phase without a barrier may do with the momentum of the phase before it: keep its
#: coefficient; set it to zero; divide it by the number of ranks; divide it so and let it rise
#: again, each step a little.
MOMENTUM_MODES = ("kept", "zero", "scaled", "ramped")

#: What is done about a rank that is slower than the others, under BSP: nothing; there is no barrier
#: as long as it is; the others go on without it until the end of their pass; each rank has batches
#: as large as it is fast.
STRAGGLER_POLICIES = ("none", "greedy", "elastic", "balance")

#: Bytes of a bucket of steps without a barrier, at most, and how many of them a model has at least
#: where it is large enough.
_MOST_BYTES, _FEWEST = 4 * 1024 * 1024, 8
#: A smaller bucket would cost more in messages than it hides of the wire.
_LEAST_BYTES = 64 * 1024


def push_count(size_bytes: int) -> int:
    """In how many buckets gradients of so many bytes are sent to owners without a barrier."""
    return max(-(-size_bytes // _MOST_BYTES), min(_FEWEST, size_bytes // _LEAST_BYTES), 1)


@dataclass(frozen=True)
class Protocol:
    """The protocols of one training.

    Attributes:
        kind: ``asp`` or ``ssp``: what ranks do when they do not wait.
        staleness: Of SSP: most steps that a rank is ahead of the slowest.
        share: Share of the work, in samples, under BSP; 1: all of it.
        async_first: Whether the rest comes before BSP and not after it.
        rate: ``divided``: without a barrier the learning rate is that of the script, divided by the
            number of ranks; ``kept``: it is not.
        momentum: One of :data:`MOMENTUM_MODES`.
        stragglers: One of :data:`STRAGGLER_POLICIES`.
        total: Samples of the whole training, of all ranks together; 0: not known.

    Raises:
        SpaceError: A value makes no sense.
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
                    f"{name}={getattr(self, name)!r} of a protocol", hint=f"It must be {wanted}."
                )

    @property
    def needs_total(self) -> bool:
        """Whether the switch is at a share of the work that has to be known."""
        return 0 < self.share < 1

    def synchronous(self, samples: int) -> bool:
        """Whether ranks wait for each other after so many samples of all of them.

        Where the whole work is not known they do.
        """
        if not self.needs_total:
            return self.share == 1
        if not self.total:
            return True
        first = 1 - self.share if self.async_first else self.share
        return (samples < math.ceil(first * self.total)) != self.async_first

    def momentum_factor(self, steps: int, ranks: int, ramp: int) -> float:
        """By what the momentum's coefficient is multiplied without a barrier.

        Args:
            steps: Steps of a rank since the switch.
            ranks: The number of ranks.
            ramp: Steps until ``ramped`` has reached the whole coefficient.
        """
        if self.momentum == "kept":
            return 1.0
        if self.momentum == "zero":
            return 0.0
        if self.momentum == "scaled":
            return 1 / ranks
        return (1 + (ranks - 1) * min(steps / ramp, 1.0)) / ranks


#: Knob -> attribute of a protocol.
_ATTRIBUTES = {
    "staleness": "staleness",
    "sync_share": "share",
    "async_first": "async_first",
    "switch_rate": "rate",
    "switch_momentum": "momentum",
    "stragglers": "stragglers",
    "total_samples": "total",
}
assert {*_ATTRIBUTES.values(), "kind"} == {field.name for field in fields(Protocol)}


def protocol_of(strategy: Mapping[str, Value]) -> Protocol | None:
    """The protocols of ``strategy``; ``None`` when ranks wait for each other in every step.

    Raises:
        SpaceError: A value makes no sense.
    """
    kind = strategy.get("protocol", "bsp")
    chosen: dict[str, object] = {
        attribute: strategy[knob] for knob, attribute in _ATTRIBUTES.items() if knob in strategy
    }
    chosen |= {"share": 1.0} if kind == "bsp" else {"kind": kind}
    protocol = Protocol(**chosen)  # type: ignore[arg-type]
    return None if protocol.share == 1 and protocol.stragglers == "none" else protocol
