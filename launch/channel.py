"""One-way control messages from the driver to a process on another host, over TCP.

The receiver makes a secret, listens on one address, and accepts one peer: the one that proves to
know the secret, which the driver has learnt over the job's own output (a pipe, or ssh). Each
message is a JSON object behind its length and an HMAC-SHA256 over everything that identifies it:
the receiver's nonce of this connection, the message's number, and its text. So nothing can be
forged, replayed, reordered or dropped unnoticed, and nothing that was not checked is parsed. The
messages are not encrypted: they hold no secret.

    receiver -> driver   nonce (32 bytes)
    driver -> receiver   length (4 bytes) | mac (32 bytes) | text, any number of times
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
from typing import Any

from hvd_autosync.sockets import keep_alive, read_exactly

_LENGTH = struct.Struct("!I")
_NONCE_BYTES = _MAC_BYTES = 32
#: A specification with its environment has a few kB.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
_HANDSHAKE_S = 5.0


class ChannelError(Exception):
    """The peer is not the one that knows the secret, or is gone."""


def new_secret() -> bytes:
    """32 random bytes."""
    return os.urandom(32)


def _mac(secret: bytes, nonce: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(secret, nonce + number.to_bytes(8, "big") + text, hashlib.sha256)


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
        ChannelError: The receiver cannot be reached.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._secret = secret
        self._number = 0
        try:
            self._socket = socket.create_connection(address, _HANDSHAKE_S)
        except OSError as error:
            raise ChannelError(f"{address[0]}:{address[1]}: {error}") from None
        self._nonce = _read(self._socket, _NONCE_BYTES)
        # A server that loads modules after a trial takes its next order only then.
        self._socket.settimeout(None)

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
        self._listener = socket.create_server((host, 0), backlog=4)
        self._nonce = b""
        self._socket: socket.socket | None = None

    @property
    def port(self) -> int:
        """The port that is listened on, while it is."""
        port: int = self._listener.getsockname()[1]
        return port

    def fileno(self) -> int:
        """Descriptor to select on for the next message, once accepted."""
        assert self._socket is not None, "accept() comes first"
        return self._socket.fileno()

    def accept(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the peer and its first message; whoever cannot prove himself is dropped.

        Raises:
            ChannelError: Nobody came in time.
        """
        self._listener.settimeout(timeout_s)
        while True:
            try:
                candidate, _ = self._listener.accept()
            except OSError:
                raise ChannelError(f"no driver within {timeout_s:.0f} s") from None
            candidate.settimeout(_HANDSHAKE_S)
            self._socket, self._nonce, self._number = candidate, os.urandom(_NONCE_BYTES), 0
            try:
                candidate.sendall(self._nonce)
                message = self.receive()
            except (ChannelError, OSError):
                candidate.close()
                continue
            self._listener.close()
            candidate.settimeout(None)
            keep_alive(candidate)
            return message

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
        self._listener.close()
        if self._socket is not None:
            self._socket.close()
