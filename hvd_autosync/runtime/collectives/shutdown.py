"""Shutdown protocol of message endpoints: when an endpoint may close.

No rank waits for a rank that is gone, and no rank leaves while another needs it. Ranks agree on it
by control messages::

    closing rank -> each rank    FIN      after its last message
    failed rank  -> each rank    FAILURE  what has failed; nothing is handled any more
    each rank    -> sender       ACK      all messages of that sender have been handled
    closing rank -> each rank    LEAVE    it has the FIN and the ACK of every rank

A closing rank ends once every rank has sent LEAVE: then no rank needs it any more. If the
connection of a rank breaks after its FIN and its ACK, that rank has ended properly.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

FIN, FAILURE, ACK, LEAVE = b"G", b"F", b"T", b"E"


class ShutdownProtocol:
    """What one rank has received about the shutdown of the others.

    Args:
        ranks: All ranks. This rank is one of them: it sends control messages to itself too, in
            order with its other messages.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = frozenset(ranks)
        self._received: dict[bytes, set[int]] = {FIN: set(), ACK: set(), LEAVE: set()}

    def received(self, kind: bytes, source: int) -> None:
        """Record a FIN, an ACK or a LEAVE from ``source``."""
        self._received[kind].add(source)

    def failed(self) -> None:
        """Forget all ACKs: from now on they acknowledge the FAILURE message."""
        self._received[ACK].clear()

    @property
    def awaited(self) -> frozenset[int]:
        """Ranks that have not sent FIN."""
        return self._ranks - self._received[FIN]

    def is_acknowledged(self, other: int) -> bool:
        """Return whether no message is in flight between this rank and ``other``."""
        return other in self._received[FIN] and other in self._received[ACK]

    def may_leave(self) -> bool:
        """Return whether no message is in flight between this rank and any rank."""
        return all(map(self.is_acknowledged, self._ranks))

    def is_over(self, lost: AbstractSet[int]) -> bool:
        """Return whether every other rank has sent LEAVE or is gone (``lost``)."""
        return self._received[LEAVE] | lost >= self._ranks

    def is_failure_known(self, own: int, lost: AbstractSet[int]) -> bool:
        """Return whether every other rank knows of the failure or is gone (``lost``)."""
        return self._received[ACK] | lost | {own} >= self._ranks
