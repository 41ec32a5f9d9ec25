"""One-way control messages from the driver to a process on another host, over TCP.

The receiver draws a secret, listens on one address, and accepts one peer, which must prove that it
knows the secret (:mod:`hvd_autosync.util.authentication`). The driver learns the secret from the
job's own output (a pipe, or ssh). Messages are JSON objects, signed and framed as
:mod:`hvd_autosync.util.connection` says. They hold no secret.
"""

from __future__ import annotations

import json
import os
from time import monotonic
from typing import Any

from hvd_autosync.util.authentication import AuthenticatedPort
from hvd_autosync.util.connection import Connection, connect

#: Far above a specification with its environment, which has a few kB.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
#: Longest time in which the driver tries to authenticate. It is long because a server may be slow
#: on a busy machine; a server that has ended refuses the connection at once.
_HANDSHAKE_S = 60.0


class ChannelError(Exception):
    """The peer does not know the secret, or the connection is closed."""


def new_secret() -> bytes:
    """Draw 32 random bytes."""
    return os.urandom(32)


class ControlSender:
    """The driver's end.

    Args:
        address: Host and port of the receiver.
        secret: The receiver's secret.

    Raises:
        ChannelError: The receiver cannot be reached, or rejects the driver.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        try:
            self._connection = connect(address, secret, monotonic() + _HANDSHAKE_S)
        except OSError as error:
            raise ChannelError(f"{address[0]}:{address[1]}: {error}") from None

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            ChannelError: The connection is closed.
        """
        try:
            self._connection.send(json.dumps(message).encode())
        except OSError as error:
            raise ChannelError(str(error)) from None

    def close(self) -> None:
        """Close the connection, which ends the receiver's process."""
        self._connection.close()


class ControlReceiver:
    """The receiver's end. It listens until one peer has connected and authenticated.

    Args:
        host: The only address to listen on.
        secret: The secret that the peer must know.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self._port = AuthenticatedPort(host, secret)
        self._connection: Connection | None = None

    @property
    def port(self) -> int:
        """The port; valid until :meth:`accept` returns."""
        return self._port.address[1]

    def fileno(self) -> int:
        """Return the descriptor to select on for the next message, after :meth:`accept`."""
        assert self._connection is not None, "call accept() first"
        return self._connection.fileno()

    def accept(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the peer and return its first message; close unauthenticated connections.

        Raises:
            ChannelError: No peer has authenticated in time, or the connection is closed.
        """
        self._connection = self._port.wait(timeout_s)
        if self._connection is None:
            raise ChannelError(f"no driver has connected within {timeout_s:.0f} s")
        self._close_port()
        return self.receive()

    def _close_port(self) -> None:
        self._port.close()
        self._port.wait()  # closes all other connections

    def receive(self) -> dict[str, Any]:
        """Wait for the next message and return it.

        Raises:
            ChannelError: The connection is closed, or the message is too long or not signed by the
                peer.
        """
        assert self._connection is not None, "call accept() first"
        try:
            message: dict[str, Any] = json.loads(self._connection.receive(MAX_MESSAGE_BYTES))
        except OSError as error:
            raise ChannelError(str(error)) from None
        return message

    def close(self) -> None:
        """Close the port and the connection; a forked child calls this, too."""
        self._close_port()
        if self._connection is not None:
            self._connection.close()
