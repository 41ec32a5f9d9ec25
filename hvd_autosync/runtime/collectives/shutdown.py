"""When a mailbox may end: no rank waits for one that is gone, and none goes while it is needed.

Ranks agree on it by letters of their own::

    closing rank -> each rank      goodbye   after its last letter
    failed rank  -> each rank      failure   what has failed; nothing is heeded any more
    each rank    -> who sent that  thanks    all of that rank's letters have been heeded
    closing rank -> each rank      leave     it has everyone's goodbye and thanks

A closing rank ends when everyone has taken leave: then nobody needs it any more. A rank whose
connection breaks after its goodbye and its thanks has ended as it should.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

GOODBYE, FAILURE, THANKS, LEAVE = b"G", b"F", b"T", b"E"


class ShutdownProtocol:
    """What one rank has heard of the others' ends.

    Args:
        ranks: All of them; this one says farewell to itself too, in the order of its own letters.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = frozenset(ranks)
        self._heard: dict[bytes, set[int]] = {GOODBYE: set(), THANKS: set(), LEAVE: set()}

    def heard(self, kind: bytes, source: int) -> None:
        """``source`` has said goodbye, thanks, or that it leaves."""
        self._heard[kind].add(source)

    def failed(self) -> None:
        """From now on thanks are for the news of a failure."""
        self._heard[THANKS].clear()

    @property
    def awaited(self) -> frozenset[int]:
        """Ranks that have not said goodbye."""
        return self._ranks - self._heard[GOODBYE]

    def has_parted(self, other: int) -> bool:
        """Whether nothing is under way between this rank and another."""
        return other in self._heard[GOODBYE] and other in self._heard[THANKS]

    def may_leave(self) -> bool:
        """Whether this is so of all ranks."""
        return all(map(self.has_parted, self._ranks))

    def is_over(self, lost: AbstractSet[int]) -> bool:
        """Whether all others know of this rank that it leaves, or have gone (``lost``)."""
        return self._heard[LEAVE] | lost >= self._ranks

    def is_known(self, own: int, lost: AbstractSet[int]) -> bool:
        """Whether all others know of a failure, or have gone (``lost``)."""
        return self._heard[THANKS] | lost | {own} >= self._ranks
