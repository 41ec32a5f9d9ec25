"""State RPC: a rank fetches the states of the others while these do something else.

Collectives need all ranks at the same place of the script. A script that saves its optimizer on
rank 0 alone is at no such place: the other ranks train on, or wait in a collective of their own. So
each rank serves its state from a thread. It listens on the job's network only, and answers only
clients that prove, for each connection, that they know a secret that Horovod's own connections
distributed.

    server -> client   nonce (32 bytes)
    client -> server   request (1 byte) | nonce (32) | MAC (32)
    server -> client   length (8) | MAC (32) | answer | MAC (32)

MACs are HMAC-SHA256 over direction, both nonces and text, so nothing can be forged or replayed.
Answers are not encrypted, nor is what Horovod itself sends. Other connections cannot keep ranks
from each other (:mod:`hvd_autosync.util.authentication`): a client whose connection is closed to
make room retries.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import hmac
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from time import monotonic, sleep

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.collectives.addresses import own_address
from hvd_autosync.runtime.collectives.agreement import gather_texts, tell_all
from hvd_autosync.runtime.collectives.operations import rank, shutdown, size
from hvd_autosync.util.authentication import (
    HANDSHAKE_S,
    NONCE_BYTES,
    AuthenticatedPeer,
    AuthenticatedPort,
)
from hvd_autosync.util.sockets import keep_alive, read_exactly, time_left

_STATES, _END = b"s", b"e"
_LENGTH = struct.Struct("!Q")
_MAC_BYTES = 32
#: A request, a nonce and a MAC.
_PROOF_BYTES = 1 + NONCE_BYTES + _MAC_BYTES
_RETRY_S = 0.02


class StateServer:
    """Serves this rank's state to the others, and fetches theirs; creating it is a collective.

    Args:
        name: Distinguishes the operations of this object from those of others; equal on all ranks.
        answer: Returns this rank's state; called in a thread of its own, and kept until no rank can
            ask any more.
    """

    def __init__(self, name: str, answer: Callable[[], bytes]) -> None:
        self._answer = answer
        self._rank = rank()
        self._secret = tell_all(os.urandom(32), f"peers.{name}")
        self._port = AuthenticatedPort(
            own_address(name), _PROOF_BYTES, self._proves, backlog=size()
        )
        own = "{}:{}".format(*self._port.address)
        addresses = [text.rpartition(":") for text in gather_texts(own, f"addresses.{name}")]
        self._addresses = [(host, int(port)) for host, _, port in addresses]
        self._closing = threading.Event()
        #: Open connections of clients.
        self._clients: set[socket.socket] = set()
        self._serving = threading.Thread(
            target=self._serve, name="hvd_autosync state server", daemon=True
        )
        self._serving.start()
        atexit.register(self._drain)

    def close(self) -> None:
        """Serve until every other rank has closed or ended, then stop; does not block."""
        self._closing.set()
        threading.Thread(
            target=self._drain_and_close, name="hvd_autosync state server closes", daemon=True
        ).start()

    def fetch_all(self) -> list[bytes]:
        """Fetch the states of all other ranks.

        Raises:
            AutosyncError: A rank cannot be reached, or fails authentication.
        """
        answers = []
        for other in self._others():
            try:
                answers.append(self._request(other, _STATES))
            except OSError as error:
                raise AutosyncError(
                    f"cannot fetch rank {other}'s part of the optimizer's state: {error}",
                    hint="Call optimizer.state_dict() before any rank ends.",
                ) from None
        return answers

    def _drain_and_close(self) -> None:
        self._await_others()
        atexit.unregister(self._drain)
        self._close_port()

    def _drain(self) -> None:
        """At exit of this process: serve until every other rank has closed or ended."""
        crashed = hasattr(sys, "last_value")  # an uncaught error: end at once
        self._closing.set()
        if not crashed:
            # A rank that waits for a collective with this one would wait forever.
            shutdown()
            self._await_others()
        # The interpreter ends the serving threads but leaves their connections open: MPI may wait
        # in its own finalization for a rank that waits for an answer.
        self._close_port()

    def _close_port(self) -> None:
        """Stop serving; clients that still wait see their connection end."""
        self._port.close()
        # It may be admitting a client now, whose connection nobody would serve or close.
        self._serving.join()
        for connection in list(self._clients):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _await_others(self) -> None:
        for other in self._others():
            with contextlib.suppress(OSError):  # the rank is gone already
                self._request(other, _END)

    def _others(self) -> list[int]:
        return [other for other in range(len(self._addresses)) if other != self._rank]

    def _request(self, other: int, request: bytes) -> bytes:
        """The other rank's answer; retries if the connection was closed to make room."""
        deadline = monotonic() + HANDSHAKE_S
        while True:
            try:
                return self._request_once(other, request, deadline)
            except ConnectionRefusedError:  # the rank is gone
                raise
            except ConnectionError:
                if monotonic() > deadline:
                    raise
                sleep(_RETRY_S)

    def _request_once(self, other: int, request: bytes, deadline: float) -> bytes:
        with socket.create_connection(self._addresses[other], time_left(deadline)) as connection:
            their_nonce = read_exactly(connection, NONCE_BYTES, deadline)
            own = os.urandom(NONCE_BYTES)
            connection.sendall(request + own + self._mac(b"ask", their_nonce, own, request))
            connection.settimeout(None)
            keep_alive(connection)

            def read(direction: bytes, count: int) -> bytes:
                text = read_exactly(connection, count)
                mac = read_exactly(connection, _MAC_BYTES)
                if not hmac.compare_digest(mac, self._mac(direction, their_nonce, own, text)):
                    raise OSError("its answer has a wrong signature")
                return text

            (length,) = _LENGTH.unpack(read(b"long", _LENGTH.size))
            return read(b"tell", length)

    def _serve(self) -> None:
        while (client := self._port.wait()) is not None:
            self._clients.add(client.connection)
            try:
                threading.Thread(target=self._reply, args=(client,), daemon=True).start()
            except RuntimeError:  # no thread could be started: the client retries
                self._clients.discard(client.connection)
                client.connection.close()

    def _reply(self, client: AuthenticatedPeer) -> None:
        with client.connection as connection:
            with contextlib.suppress(OSError):  # the client is gone
                self._reply_to(connection, client)
            self._clients.discard(connection)

    def _reply_to(self, connection: socket.socket, client: AuthenticatedPeer) -> None:
        request, their_nonce, _ = self._parts(client.proof)
        keep_alive(connection)
        if request == _END:
            self._closing.wait()
        answer = self._answer() if request == _STATES else b""
        for direction, text in ((b"long", _LENGTH.pack(len(answer))), (b"tell", answer)):
            connection.sendall(text)
            connection.sendall(self._mac(direction, client.nonce, their_nonce, text))

    def _proves(self, own: bytes, proof: bytes) -> bool:
        request, their_nonce, mac = self._parts(proof)
        return hmac.compare_digest(mac, self._mac(b"ask", own, their_nonce, request))

    @staticmethod
    def _parts(proof: bytes) -> tuple[bytes, bytes, bytes]:
        """Request, nonce and MAC."""
        return proof[:1], proof[1:-_MAC_BYTES], proof[-_MAC_BYTES:]

    def _mac(self, direction: bytes, asked: bytes, client: bytes, text: bytes) -> bytes:
        return hmac.digest(self._secret, direction + asked + client + text, hashlib.sha256)
