"""One-way control messages from the driver to a process on another host, over TCP.

The receiver makes a secret, listens on one address, and accepts one peer: the one that proves to
know the secret, which the driver has learnt over the job's own output (a pipe, or ssh). Strangers
cannot keep it out (:mod:`hvd_autosync.util.authentication`): where it has to make room for a crowd,
it comes again until it is let in, which the receiver signs too.

Each message is a JSON object behind its length and an HMAC-SHA256 over everything that identifies
it: the receiver's nonce of this connection, the message's number, and its text. So nothing can be
forged, replayed, reordered or dropped unnoticed, and nothing that was not checked is parsed. The
messages are not encrypted: they hold no secret.

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
#: A specification with its environment has a few kB.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
#: A driver that is not let in by then gives up. A server may be slow on a busy machine; one that
#: is gone has no port.
_HANDSHAKE_S = 60.0
_AGAIN_S = 0.02


class ChannelError(Exception):
    """The peer is not the one that knows the secret, or is gone."""


def new_secret() -> bytes:
    """32 random bytes."""
    return os.urandom(32)


def _mac(secret: bytes, nonce: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(secret, nonce + number.to_bytes(8, "big") + text, hashlib.sha256)


def _proof(secret: bytes, nonce: bytes, who: bytes) -> bytes:
    return hmac.digest(secret, nonce + who, hashlib.sha256)


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
        ChannelError: The receiver cannot be reached, or does not let it in.
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
                crowd = isinstance(error, ConnectionError)
                if not crowd or isinstance(error, ConnectionRefusedError) or monotonic() > deadline:
                    raise ChannelError(f"{address[0]}:{address[1]}: {error}") from None
            sleep(_AGAIN_S)

    def _enter(self, address: tuple[str, int], deadline: float) -> tuple[socket.socket, bytes]:
        connection = socket.create_connection(address, time_left(deadline))
        try:
            nonce = read_exactly(connection, NONCE_BYTES, deadline)
            connection.sendall(_proof(self._secret, nonce, b"driver"))
            mac = read_exactly(connection, _MAC_BYTES, deadline)
            if not hmac.compare_digest(mac, _proof(self._secret, nonce, b"receiver")):
                raise OSError("somebody else listens there")
        except BaseException:
            connection.close()
            raise
        # A server that loads modules after a trial takes its next order only then.
        connection.settimeout(None)
        return connection, nonce

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            ChannelError: The receiver is gone.
        """
        text = json.dumps(message).encode()
        mac = _mac(self._secret, self._nonce, self._number, text)
        self._number += 1
        try:
            self._socket.sendall(_LENGTH.pack(len(text)) + mac + text)
        except OSError as error:
            raise ChannelError(str(error)) from None

    def close(self) -> None:
        """Hang up; the receiver ends."""
        self._socket.close()


class ControlReceiver:
    """The other end. It listens until its one peer has connected and proved itself.

    Args:
        host: The address to listen on, and only on that.
        secret: What the peer must know.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._number = 0
        self._admission = AuthenticatedPort(host, _MAC_BYTES, self._proves)
        self._nonce = b""
        self._socket: socket.socket | None = None

    @property
    def port(self) -> int:
        """The port that is listened on, while it is."""
        return self._admission.address[1]

    def fileno(self) -> int:
        """Descriptor to select on for the next message, once accepted."""
        assert self._socket is not None, "accept() comes first"
        return self._socket.fileno()

    def accept(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the peer and its first message; whoever cannot prove himself is dropped.

        Raises:
            ChannelError: Nobody came in time, or the peer is gone.
        """
        driver = self._admission.wait(timeout_s)
        if driver is None:
            raise ChannelError(f"no driver within {timeout_s:.0f} s")
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
        self._admission.close()
        self._admission.wait()  # which drops all others

    def receive(self) -> dict[str, Any]:
        """The next message.

        Raises:
            ChannelError: The peer is gone, or what came is not from it.
        """
        assert self._socket is not None, "accept() comes first"
        (length,) = _LENGTH.unpack(_read(self._socket, _LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise ChannelError(f"a message of {length} bytes")
        mac = _read(self._socket, _MAC_BYTES)
        text = _read(self._socket, length)
        if not hmac.compare_digest(mac, _mac(self._secret, self._nonce, self._number, text)):
            raise ChannelError("a message with a wrong signature")
        self._number += 1
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        """Close everything, as in a forked child."""
        self._close_port()
        if self._socket is not None:
            self._socket.close()
