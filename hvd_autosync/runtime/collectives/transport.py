"""What carries letters between ranks: the contract of ``mail_zmq.py`` and ``mail_mpi.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

#: Source rank, kind and head, body.
TransportMessage = tuple[int, bytes, memoryview]


class Transport(Protocol):
    """How letters travel. All but :meth:`wake` and :meth:`forget` is for the service thread."""

    @property
    def awaited(self) -> AbstractSet[int]:
        """Ranks to which there is no connection yet."""

    @property
    def lost(self) -> Mapping[int, str]:
        """Ranks whose connection broke, and how."""

    def send(self, to: int, text: bytes, body: memoryview) -> None:
        """Begin to send to another rank, after what was sent to it before; waits for nothing."""

    def receive(self, most_s: float) -> Sequence[TransportMessage]:
        """What arrived; waits until something does, :meth:`wake` is called, or time is over."""

    def wake(self) -> None:
        """End the wait of :meth:`receive`, or the next one; from any thread."""

    def end(self) -> None:
        """Go, when all that was sent is out, or a second later; nothing can be called after it."""

    def forget(self) -> None:
        """Leave the connections to the parent; called in a forked child."""
