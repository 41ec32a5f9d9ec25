"""Signed messages between two processes that know a secret: one handshake, one framing.

The one that listens is the port (:mod:`hvd_autosync.util.authentication`), the other the peer::

    port -> peer   nonce (32 bytes)
    peer -> port   nonce (32) | proof (32)
    port -> peer   proof (32)

Then each side may send messages::

    length (8) | MAC (32) | text | MAC (32)

Proofs and MACs are HMAC-SHA256. A proof is over the role and both nonces. MACs have a key of their
own for each connection and direction, derived likewise, and are over the number of the message and
its length or text. So messages that are forged, replayed, reordered, left out, sent back or taken
from another connection are detected, nothing unverified is parsed, and no forged length can fill
the memory. Messages are not encrypted, nor is what Horovod itself sends.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

from hvd_autosync.util.sockets import keep_alive, read_exactly, time_left

NONCE_BYTES = 32
_MAC_BYTES = 32
#: What the peer sends in the handshake: its nonce and its proof.
PROOF_BYTES = NONCE_BYTES + _MAC_BYTES
_LENGTH = struct.Struct("!Q")
_RETRY_S = 0.02
_PORT, _PEER = b"port", b"peer"

_Result = TypeVar("_Result")


class AuthenticationError(OSError):
    """The other side does not know the secret, or a message is not what it has sent."""


class Connection:
    """One end of an authenticated connection; messages are bytes of any length.

    One thread may send while another receives.
    """

    def __init__(self, sock: socket.socket, secret: bytes, nonces: bytes, *, is_port: bool) -> None:
        self._socket = sock
        own, other = (_PORT, _PEER) if is_port else (_PEER, _PORT)
        self._sending = _Signer(_digest(secret, b"messages of the " + own + nonces))
        self._receiving = _Signer(_digest(secret, b"messages of the " + other + nonces))
        sock.settimeout(None)  # the other side may be busy, and read or answer late
        keep_alive(sock)

    def send(self, text: bytes | memoryview) -> None:
        """Send one message.

        Raises:
            OSError: The connection is closed.
        """
        length = _LENGTH.pack(len(text))
        self._socket.sendall(length + self._sending.sign(length))
        self._socket.sendall(text)
        self._socket.sendall(self._sending.sign(text))

    def receive(self, most_bytes: int | None = None, deadline: float | None = None) -> bytes:
        """Wait for the next message and return it.

        Args:
            most_bytes: The longest message; ``None``: any length.
            deadline: Time by which it must have arrived, by the monotonic clock.

        Raises:
            AuthenticationError: The message is not what the other side has sent next, or is too
                long. Nothing can be received after it.
            OSError: The connection is closed, or the deadline has passed.
        """
        try:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
            if most_bytes is not None and length > most_bytes:
                raise AuthenticationError(
                    f"a message has {length} bytes; the limit is {most_bytes}"
                )
            return self._read(length, deadline)
        finally:
            if deadline is not None and self._socket.fileno() >= 0:
                self._socket.settimeout(None)

    def _read(self, count: int, deadline: float | None) -> bytes:
        text = read_exactly(self._socket, count, deadline)
        mac = read_exactly(self._socket, _MAC_BYTES, deadline)
        if not hmac.compare_digest(mac, self._receiving.sign(text)):
            raise AuthenticationError("a message has a wrong signature")
        return text

    def fileno(self) -> int:
        """Return the descriptor to select on for the next message."""
        return self._socket.fileno()

    def interrupt(self) -> None:
        """End the connection for both sides; may be called from any thread."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this process's end."""
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Signer:
    """Signs the parts of messages of one direction, in order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def sign(self, part: bytes | memoryview) -> bytes:
        mac = hmac.new(self._key, self._number.to_bytes(8, "big"), hashlib.sha256)
        mac.update(part)
        self._number += 1
        return mac.digest()


def connect(address: tuple[str, int], secret: bytes, deadline: float) -> Connection:
    """Connect to a port that knows ``secret``.

    A connection that the port has closed, as it does to make room for others, is retried until the
    deadline.

    Args:
        address: Host and port.
        secret: The secret.
        deadline: Time by which the port must have accepted, by the monotonic clock.

    Raises:
        AuthenticationError: The listener does not know the secret.
        ConnectionRefusedError: Nobody listens.
        OSError: The port cannot be reached, or does not accept this process in time.
    """
    return retry_until(deadline, lambda: _connect_once(address, secret, deadline))


def retry_until(deadline: float, attempt: Callable[[], _Result]) -> _Result:
    """Repeat an attempt whose connection was closed by the other side, which still listens.

    Raises:
        OSError: The attempt has failed in another way, or the deadline has passed.
    """
    while True:
        try:
            return attempt()
        except ConnectionRefusedError:
            raise
        except ConnectionError:
            if monotonic() > deadline:
                raise
        sleep(_RETRY_S)


def _connect_once(address: tuple[str, int], secret: bytes, deadline: float) -> Connection:
    sock = socket.create_connection(address, time_left(deadline))
    try:
        theirs = read_exactly(sock, NONCE_BYTES, deadline)
        own = os.urandom(NONCE_BYTES)
        nonces = theirs + own
        sock.sendall(own + _proof(secret, _PEER, nonces))
        proof = read_exactly(sock, _MAC_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(secret, _PORT, nonces)):
            raise AuthenticationError("the listener does not know the secret")
        return Connection(sock, secret, nonces, is_port=False)
    except BaseException:
        sock.close()
        raise


def accept_proof(
    sock: socket.socket, secret: bytes, nonce: bytes, proof: bytes
) -> Connection | None:
    """Return the port's side of the handshake, once a peer has sent its proof.

    Args:
        sock: The connection, in blocking mode.
        secret: The secret.
        nonce: What the port has sent.
        proof: What the peer has sent, ``PROOF_BYTES`` long.

    Returns:
        The connection; ``None`` if the peer does not know the secret.

    Raises:
        OSError: The peer has closed the connection.
    """
    nonces = nonce + proof[:NONCE_BYTES]
    if not hmac.compare_digest(proof[NONCE_BYTES:], _proof(secret, _PEER, nonces)):
        return None
    sock.sendall(_proof(secret, _PORT, nonces))
    return Connection(sock, secret, nonces, is_port=True)


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return _digest(secret, b"proof of the " + role + nonces)


def _digest(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, hashlib.sha256)
