"""Transport of messages between ranks: an interface.

``transport_zmq.py`` and ``transport_mpi.py`` implement it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

#: Source rank, kind and head, body.
TransportMessage = tuple[int, bytes, memoryview]


class Transport(Protocol):
    """Carries messages.

    Only :meth:`wake` and :meth:`forget` may be called outside the service thread.
    """

    @property
    def awaited(self) -> AbstractSet[int]:
        """Ranks to which there is no connection yet."""

    @property
    def lost(self) -> Mapping[int, str]:
        """Ranks whose connection broke, each with the reason."""

    def send(self, to: int, text: bytes, body: memoryview) -> None:
        """Begin to send to another rank, in order with earlier messages; does not block."""

    def receive(self, most_s: float) -> Sequence[TransportMessage]:
        """Return what arrived; waits for a message, for :meth:`wake`, or for ``most_s`` seconds."""

    def wake(self) -> None:
        """End the wait of :meth:`receive`, or its next one; from any thread."""

    def end(self) -> None:
        """Close, after at most a second for what is queued; nothing may be called after it."""

    def forget(self) -> None:
        """Leave the connections to the parent process; called in a forked child."""
