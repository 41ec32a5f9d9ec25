"""Parameter server of one rank's shards: how it applies gradients, and when it answers.

Under ASP it makes a step of every gradient on arrival, and answers at once. Under SSP(s) it delays
the answer to a rank that is more than s steps ahead of the slowest. Under SSP(0) all ranks are at
the same step, so it makes one step of the mean of their gradients, which is the step of BSP. A step
that a rank skips counts as one without a gradient. Until the next segment, no rank waits for one
that has drained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hvd_autosync.runtime.sync.shards import Share
from hvd_autosync.search_space.protocol import Protocol

#: Steps of a rank until a ramped momentum has reached its full value.
_RAMP = 100


@dataclass(frozen=True)
class Push:
    """A gradient of one rank for one bucket, or word that it has skipped a step and has none.

    Attributes:
        source: The rank.
        bucket: Number of the bucket.
        clock: The rank's step in this segment, from 1.
        version: Version of the parameters that the gradient was computed with; -1: the first ones.
        rates: Learning rates of that step, by parameter group; none if it was skipped.
        absent: Places in the bucket of parameters without a gradient.
    """

    source: int
    bucket: int
    clock: int
    version: int
    rates: Sequence[float] = ()
    absent: Collection[int] = ()


@dataclass
class _Owned:
    """One share, with the state of the ranks that push to it.

    Attributes:
        share: The share.
        clocks: Rank -> its last step in this segment.
        unanswered: Rank -> its last push, while that is unanswered.
    """

    share: Share
    clocks: dict[int, int] = field(default_factory=dict)
    unanswered: dict[int, Push] = field(default_factory=dict)


class ParameterServer:
    """The server of all shares of one rank.

    Args:
        shares: By bucket.
        ranks: The number of ranks.
        protocol: The protocol.
        summed: Whether learning rates fit the sum of all ranks' gradients rather than their mean.

    Attributes:
        staleness: Staleness of a gradient on arrival, in steps of other ranks -> number of
            gradients.
    """

    def __init__(
        self, shares: Sequence[Share], ranks: int, protocol: Protocol, *, summed: bool
    ) -> None:
        self.staleness: Counter[int] = Counter()
        self._owned = [_Owned(share) for share in shares]
        self._ranks = ranks
        self._protocol = protocol
        self._most_ahead = protocol.staleness if protocol.kind == "ssp" else None
        divided = ranks if protocol.rate == "divided" else 1
        self._rate = (ranks if summed else 1) / divided
        self._summed = summed
        self._drained: set[int] = set()

    @property
    def shares(self) -> list[Share]:
        """The shares, by bucket."""
        return [owned.share for owned in self._owned]

    @property
    def all_drained(self) -> bool:
        """Whether every rank has made its last step of this segment."""
        return len(self._drained) == self._ranks

    def begin_segment(self) -> None:
        """Begin a segment: every rank starts again with its first step."""
        self._drained.clear()
        for owned in self._owned:
            owned.clocks.clear()

    def pushed(self, push: Push, gradient: torch.Tensor) -> Iterator[Push]:
        """Apply a gradient that arrived; yields the pushes that can be answered now."""
        share = self._owned[push.bucket].share
        share.add(gradient, push.absent)
        if self._most_ahead != 0:
            self.staleness[share.version - max(push.version, 0)] += 1
            steps = share.version // self._ranks
            momentum = self._protocol.momentum_factor(steps, self._ranks, _RAMP)
            share.step([rate * self._rate for rate in push.rates], momentum)
        yield from self._noted(push)

    def skipped(self, push: Push) -> Iterator[Push]:
        """Note that a rank has skipped a step; yields the pushes that can be answered now."""
        yield from self._noted(push)

    def drained(self, rank: int) -> Iterator[Push]:
        """Note that a rank has made its last step of this segment.

        Yields:
            The pushes that can be answered now.
        """
        self._drained.add(rank)
        for owned in self._owned:
            yield from self._answered(owned)

    def _noted(self, push: Push) -> list[Push]:
        """Count a step of a rank, which waits now; return the pushes that can be answered."""
        owned = self._owned[push.bucket]
        owned.clocks[push.source] = push.clock
        owned.unanswered[push.source] = push
        return self._answered(owned)

    def _answered(self, owned: _Owned) -> list[Push]:
        awaited = set(range(self._ranks)) - self._drained
        if self._most_ahead is None:
            ready = list(owned.unanswered.values())
        elif self._most_ahead == 0:
            ready = self._step_of_all(owned, awaited)
        else:
            slowest = min((owned.clocks.get(each, 0) for each in awaited), default=None)
            ready = [
                push
                for push in owned.unanswered.values()
                if slowest is None or push.clock - slowest <= self._most_ahead
            ]
        for push in ready:
            del owned.unanswered[push.source]
        return ready

    def _step_of_all(self, owned: _Owned, awaited: set[int]) -> list[Push]:
        """Make the step of BSP if all ranks that still make steps have sent or skipped theirs."""
        here = owned.unanswered
        if not here or not awaited <= set(here):
            return []
        made = {each: push for each, push in here.items() if push.rates}
        if made:  # else all have skipped it
            self.staleness[0] += len(made)
            rates = made[min(made)].rates
            owned.share.step(rates, scale=1.0 if self._summed else 1 / len(made))
        return list(here.values())
