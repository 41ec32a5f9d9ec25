"""A TCP port for peers that prove to know its secret; other clients cannot block or exhaust it.

One thread waits for all connections at once. Each has one deadline for its whole proof, however
slowly it sends. The number of unauthenticated connections is bounded: a further one replaces the
oldest, so that a peer that answers at once authenticates even during a flood of connections. Only
:meth:`AuthenticatedPort.close` ends the port. The handshake is that of
:mod:`hvd_autosync.util.connection`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from dataclasses import dataclass
from time import monotonic, sleep

from hvd_autosync.util.connection import NONCE_BYTES, PROOF_BYTES, Connection, accept_proof

#: Longest time for a whole proof, seconds.
HANDSHAKE_S = 30.0
#: Most unauthenticated connections.
_MOST = 64
#: Seconds for which a connection is not replaced by a newer one.
_ROOM_S = 0.05
#: Smallest number of connections that the system queues until they are accepted.
_BACKLOG = 1024
#: Pause of a process that has no descriptors left.
_PAUSE_S = 0.1


@dataclass
class _PendingPeer:
    """An unauthenticated connection, and the part of its proof that has arrived."""

    connection: socket.socket
    nonce: bytes
    since: float
    received: bytes = b""


class AuthenticatedPort:
    """Listens for peers; all methods except :meth:`close` must be called by one thread.

    Args:
        host: The only address to listen on.
        secret: What peers must know.
        backlog: Number of connections that the system queues until they are accepted.
    """

    def __init__(self, host: str, secret: bytes, backlog: int = 0) -> None:
        self._listener = socket.create_server((host, 0), backlog=max(backlog, _BACKLOG))
        self._listener.setblocking(False)
        self._secret = secret
        #: In the order of arrival.
        self._pending: dict[socket.socket, _PendingPeer] = {}
        self._closed = False
        self._waits = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._listener.getsockname()
        return host, port

    def wait(self, most_s: float | None = None) -> Connection | None:
        """Return the next peer's connection; ``None`` after ``most_s`` seconds or when closed."""
        deadline = None if most_s is None else monotonic() + most_s
        self._waits = True
        try:
            return self._next(deadline)
        finally:
            self._waits = False
            if self._closed:
                self._listener.close()

    def _next(self, deadline: float | None) -> Connection | None:
        while not self._closed:
            now = monotonic()
            self._drop_expired(now)
            if deadline is not None and now >= deadline:
                return None
            for key in self._ready(now, deadline):
                if key is self._listener:
                    self._accept()
                elif (peer := self._receive(key)) is not None:
                    return peer
        for connection in list(self._pending):
            self._drop(connection)
        return None

    def close(self) -> None:
        """Close the port and let :meth:`wait` return; may be called from any thread."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes wait(), which close() does not
        # If wait() runs, it closes the listener itself: its descriptor must not be reused before.
        if not self._waits:
            self._listener.close()

    def _ready(self, now: float, deadline: float | None) -> list[socket.socket]:
        """Return the readable sockets; the listener is among them only while there is room."""
        until = [] if deadline is None else [deadline]
        oldest = next(iter(self._pending.values()), None)
        if oldest is not None:
            until.append(oldest.since + HANDSHAKE_S)
        full = len(self._pending) >= _MOST
        room = not full or oldest is None or now - oldest.since >= _ROOM_S
        if not room and oldest is not None:
            until.append(oldest.since + _ROOM_S)
        wait_s = max(min(until) - now, 0.0) if until else None
        # Unlike epoll, poll needs no descriptor of its own.
        with selectors.PollSelector() as selector, contextlib.suppress(OSError, ValueError):
            for connection in self._pending:
                selector.register(connection, selectors.EVENT_READ)
            if room:
                selector.register(self._listener, selectors.EVENT_READ)  # fails if closed
            return [key.fileobj for key, _ in selector.select(wait_s)]  # type: ignore[misc]
        return []

    def _accept(self) -> None:
        if len(self._pending) >= _MOST:
            self._drop_oldest()
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # the client has disconnected already
            return
        except OSError:  # no descriptor or memory left, or the port was closed
            if not self._closed and not self._drop_oldest():
                sleep(_PAUSE_S)
            return
        nonce = os.urandom(NONCE_BYTES)
        self._pending[connection] = _PendingPeer(connection, nonce, monotonic())
        connection.setblocking(False)
        try:
            connection.send(nonce)
        except OSError:
            self._drop(connection)

    def _receive(self, connection: socket.socket) -> Connection | None:
        """Receive a part of a proof; return the connection if it is complete and valid."""
        pending = self._pending.get(connection)
        if pending is None:  # it was replaced just now
            return None
        try:
            data = connection.recv(PROOF_BYTES - len(pending.received))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        pending.received += data
        if data and len(pending.received) < PROOF_BYTES:
            return None
        authenticated = None
        if data:
            connection.setblocking(True)
            with contextlib.suppress(OSError):  # the peer is gone
                authenticated = accept_proof(
                    connection, self._secret, pending.nonce, pending.received
                )
        if authenticated is None:
            self._drop(connection)
        else:
            del self._pending[connection]
        return authenticated

    def _drop_expired(self, now: float) -> None:
        for pending in list(self._pending.values()):
            if now - pending.since < HANDSHAKE_S:
                break
            self._drop(pending.connection)

    def _drop_oldest(self) -> bool:
        """Close the oldest unauthenticated connection; return whether there was one."""
        oldest = next(iter(self._pending), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, connection: socket.socket) -> None:
        del self._pending[connection]
        connection.close()
