"""A port for who proves to know a secret, which strangers can neither block nor exhaust.

All connections are waited for at once, in one thread. Each has one deadline for its whole proof,
however slowly it talks; there are never more than a few without proof, and where there is no room
for another the one that came first goes, so that a peer that answers at once comes in through a
crowd. Nothing but :meth:`AuthenticatedPort.close` ends it.

    port -> peer   nonce (32 bytes)
    peer -> port   proof
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep

NONCE_BYTES = 32
#: Seconds for a whole proof.
HANDSHAKE_S = 30.0
#: Most connections without proof.
_MOST = 64
#: A connection may stay so many seconds before it has to make room for others.
_ROOM_S = 0.05
#: Connections that the system keeps until they are looked at, at least.
_BACKLOG = 1024
#: Wait of a process that has no descriptors left.
_PAUSE_S = 0.1


@dataclass
class _Unauthenticated:
    """A connection without proof, and what it has said so far."""

    connection: socket.socket
    nonce: bytes
    since: float
    said: bytes = b""


@dataclass(frozen=True)
class AuthenticatedPeer:
    """A connection with its proof; it blocks."""

    connection: socket.socket
    nonce: bytes
    proof: bytes


class AuthenticatedPort:
    """Waits for peers; all methods but :meth:`close` are for one thread.

    Args:
        host: The address to listen on, and only on that.
        proof_bytes: Length of a proof.
        proves: Whether a proof fits a nonce.
        backlog: Connections that the system keeps until they are looked at.
    """

    def __init__(
        self, host: str, proof_bytes: int, proves: Callable[[bytes, bytes], bool], backlog: int = 0
    ) -> None:
        self._listener = socket.create_server((host, 0), backlog=max(backlog, _BACKLOG))
        self._listener.setblocking(False)
        self._proof_bytes = proof_bytes
        self._proves = proves
        #: In the order of their arrival.
        self._unauthenticated: dict[socket.socket, _Unauthenticated] = {}
        self._closed = False
        self._waits = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._listener.getsockname()
        return host, port

    def wait(self, most_s: float | None = None) -> AuthenticatedPeer | None:
        """The next that has proved himself; ``None`` after ``most_s`` seconds, or when closed."""
        deadline = None if most_s is None else monotonic() + most_s
        self._waits = True
        try:
            return self._next(deadline)
        finally:
            self._waits = False
            if self._closed:
                self._listener.close()

    def _next(self, deadline: float | None) -> AuthenticatedPeer | None:
        while not self._closed:
            now = monotonic()
            self._drop_late(now)
            if deadline is not None and now >= deadline:
                return None
            for key in self._ready(now, deadline):
                if key is self._listener:
                    self._accept()
                elif (peer := self._listen(key)) is not None:
                    return peer
        for connection in list(self._unauthenticated):
            self._drop(connection)
        return None

    def close(self) -> None:
        """Let nobody in any more, and have :meth:`wait` return; from any thread."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits, as close() does not
        # Who is about to wait must not find another file under its number.
        if not self._waits:
            self._listener.close()

    def _ready(self, now: float, deadline: float | None) -> list[socket.socket]:
        """What can be read; the port itself only while there is room."""
        until = [] if deadline is None else [deadline]
        oldest = next(iter(self._unauthenticated.values()), None)
        if oldest is not None:
            until.append(oldest.since + HANDSHAKE_S)
        full = len(self._unauthenticated) >= _MOST
        room = not full or oldest is None or now - oldest.since >= _ROOM_S
        if not room and oldest is not None:
            until.append(oldest.since + _ROOM_S)
        wait_s = max(min(until) - now, 0.0) if until else None
        # It needs no descriptor of its own, as epoll does.
        with selectors.PollSelector() as selector, contextlib.suppress(OSError, ValueError):
            for connection in self._unauthenticated:
                selector.register(connection, selectors.EVENT_READ)
            if room:
                selector.register(self._listener, selectors.EVENT_READ)  # fails if closed meanwhile
            return [key.fileobj for key, _ in selector.select(wait_s)]  # type: ignore[misc]
        return []

    def _accept(self) -> None:
        if len(self._unauthenticated) >= _MOST:
            self._drop_oldest()
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # it is gone already
            return
        except OSError:  # of descriptors or memory there are none left, or it was closed
            if not self._closed and not self._drop_oldest():
                sleep(_PAUSE_S)
            return
        nonce = os.urandom(NONCE_BYTES)
        self._unauthenticated[connection] = _Unauthenticated(connection, nonce, monotonic())
        connection.setblocking(False)
        try:
            connection.send(nonce)
        except OSError:
            self._drop(connection)

    def _listen(self, connection: socket.socket) -> AuthenticatedPeer | None:
        """Take what a stranger says."""
        pending = self._unauthenticated.get(connection)
        if pending is None:  # it had to make room just now
            return None
        try:
            said = connection.recv(self._proof_bytes - len(pending.said))
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        pending.said += said
        if said and len(pending.said) < self._proof_bytes:
            return None
        if not said or not self._proves(pending.nonce, pending.said):
            self._drop(connection)
            return None
        del self._unauthenticated[connection]
        connection.setblocking(True)
        return AuthenticatedPeer(connection, pending.nonce, pending.said)

    def _drop_late(self, now: float) -> None:
        for pending in list(self._unauthenticated.values()):
            if now - pending.since < HANDSHAKE_S:
                break
            self._drop(pending.connection)

    def _drop_oldest(self) -> bool:
        """Whether there was one."""
        oldest = next(iter(self._unauthenticated), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, connection: socket.socket) -> None:
        del self._unauthenticated[connection]
        connection.close()
