"""One-way control messages from the driver to a process on another host, over TCP.

The receiver draws a secret, listens on one address, and accepts one peer, which must prove that it
knows the secret. The driver learns the secret from the job's own output (a pipe, or ssh).
Unauthenticated connections cannot lock the driver out (:mod:`hvd_autosync.util.authentication`): if
its connection is closed to make room for others, it connects again until the receiver accepts it.
The receiver signs its acceptance.

Each message is a JSON object after its length and an HMAC-SHA256 over the receiver's nonce of this
connection, the message's number and its text. Forged, replayed, reordered and dropped messages are
therefore detected, and unverified input is never parsed. Messages are not encrypted, because they
hold no secret.

    receiver -> driver   nonce (32 bytes)
    driver -> receiver   mac (32 bytes)
    receiver -> driver   mac (32 bytes)
    driver -> receiver   length (4 bytes) | mac (32 bytes) | text, any number of times
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
from time import monotonic, sleep
from typing import Any

from hvd_autosync.util.authentication import NONCE_BYTES, AuthenticatedPort
from hvd_autosync.util.sockets import keep_alive, read_exactly, time_left

_LENGTH = struct.Struct("!I")
_MAC_BYTES = 32
#: Far above a specification with its environment, which has a few kB.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
#: Longest time in which the driver tries to authenticate. It is long because a server may be slow
#: on a busy machine; a server that has ended refuses the connection at once.
_HANDSHAKE_S = 60.0
_AGAIN_S = 0.02


class ChannelError(Exception):
    """The peer does not know the secret, or the connection is closed."""


def new_secret() -> bytes:
    """Draw 32 random bytes."""
    return os.urandom(32)


def _mac(secret: bytes, nonce: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(secret, nonce + number.to_bytes(8, "big") + text, hashlib.sha256)


def _proof(secret: bytes, nonce: bytes, role: bytes) -> bytes:
    return hmac.digest(secret, nonce + role, hashlib.sha256)


def _read(sock: socket.socket, count: int) -> bytes:
    try:
        return read_exactly(sock, count)
    except OSError as error:
        raise ChannelError(str(error)) from None


class ControlSender:
    """The driver's end.

    Args:
        address: Host and port of the receiver.
        secret: The receiver's secret.

    Raises:
        ChannelError: The receiver cannot be reached, or rejects the driver.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._secret = secret
        self._number = 0
        deadline = monotonic() + _HANDSHAKE_S
        while True:
            try:
                self._socket, self._nonce = self._enter(address, deadline)
                return
            except OSError as error:
                crowded_out = isinstance(error, ConnectionError)
                if (
                    not crowded_out
                    or isinstance(error, ConnectionRefusedError)
                    or monotonic() > deadline
                ):
                    raise ChannelError(f"{address[0]}:{address[1]}: {error}") from None
            sleep(_AGAIN_S)

    def _enter(self, address: tuple[str, int], deadline: float) -> tuple[socket.socket, bytes]:
        connection = socket.create_connection(address, time_left(deadline))
        try:
            nonce = read_exactly(connection, NONCE_BYTES, deadline)
            connection.sendall(_proof(self._secret, nonce, b"driver"))
            mac = read_exactly(connection, _MAC_BYTES, deadline)
            if not hmac.compare_digest(mac, _proof(self._secret, nonce, b"receiver")):
                raise OSError("the listener does not know the server's secret")
        except BaseException:
            connection.close()
            raise
        # No timeout: a server that imports modules after a trial reads its next order late.
        connection.settimeout(None)
        return connection, nonce

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            ChannelError: The connection is closed.
        """
        text = json.dumps(message).encode()
        mac = _mac(self._secret, self._nonce, self._number, text)
        self._number += 1
        try:
            self._socket.sendall(_LENGTH.pack(len(text)) + mac + text)
        except OSError as error:
            raise ChannelError(str(error)) from None

    def close(self) -> None:
        """Close the connection, which ends the receiver's process."""
        self._socket.close()


class ControlReceiver:
    """The receiver's end. It listens until one peer has connected and authenticated.

    Args:
        host: The only address to listen on.
        secret: The secret that the peer must know.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._number = 0
        self._authenticated_port = AuthenticatedPort(host, _MAC_BYTES, self._proves)
        self._nonce = b""
        self._socket: socket.socket | None = None

    @property
    def port(self) -> int:
        """The port; valid until :meth:`accept` returns."""
        return self._authenticated_port.address[1]

    def fileno(self) -> int:
        """Return the descriptor to select on for the next message, after :meth:`accept`."""
        assert self._socket is not None, "call accept() first"
        return self._socket.fileno()

    def accept(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the peer and return its first message; close unauthenticated connections.

        Raises:
            ChannelError: No peer has authenticated in time, or the connection is closed.
        """
        driver = self._authenticated_port.wait(timeout_s)
        if driver is None:
            raise ChannelError(f"no driver has connected within {timeout_s:.0f} s")
        self._close_port()
        self._socket, self._nonce = driver.connection, driver.nonce
        keep_alive(self._socket)
        try:
            self._socket.sendall(_proof(self._secret, self._nonce, b"receiver"))
        except OSError as error:
            raise ChannelError(str(error)) from None
        return self.receive()

    def _proves(self, nonce: bytes, proof: bytes) -> bool:
        return hmac.compare_digest(proof, _proof(self._secret, nonce, b"driver"))

    def _close_port(self) -> None:
        self._authenticated_port.close()
        self._authenticated_port.wait()  # closes all other connections

    def receive(self) -> dict[str, Any]:
        """Wait for the next message and return it.

        Raises:
            ChannelError: The connection is closed, or the message is too long or not signed by the
                peer.
        """
        assert self._socket is not None, "call accept() first"
        (length,) = _LENGTH.unpack(_read(self._socket, _LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise ChannelError(f"a message has {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
        mac = _read(self._socket, _MAC_BYTES)
        text = _read(self._socket, length)
        if not hmac.compare_digest(mac, _mac(self._secret, self._nonce, self._number, text)):
            raise ChannelError("a message has a wrong signature")
        self._number += 1
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        """Close the port and the connection; a forked child calls this, too."""
        self._close_port()
        if self._socket is not None:
            self._socket.close()
