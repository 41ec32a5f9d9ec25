"""Questions that ranks put to each other while these do something else.

Collectives need all ranks at the same place of the script. A script that saves its optimizer on
rank 0 alone is at no such place: the other ranks train on, or wait in a collective of their own.
So each rank answers from a thread. It listens on the job's network only, and only to those who
prove, in each connection, that they know a secret which Horovod's own connections carried to them.

    asked -> asking   nonce (32 bytes)
    asking -> asked   question (1 byte) | nonce (32) | mac (32)
    asked -> asking   length (8) | answer | mac (32)

Macs are HMAC-SHA256 over direction, both nonces and text, so nothing can be forged or replayed.
Answers are not encrypted, as what Horovod itself sends is not.
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

from horovod.torch.mpi_ops import rank, shutdown, size

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.addresses import own_address
from hvd_autosync.runtime.agreement import gather_texts, tell_all
from hvd_autosync.sockets import keep_alive, read_exactly

_STATES, _END = b"s", b"e"
_LENGTH = struct.Struct("!Q")
_NONCE_BYTES = _MAC_BYTES = 32
_HANDSHAKE_S = 30.0


class Peers:
    """The other ranks, as those that can be asked; a collective when it is made.

    Args:
        name: Tells the operations of this object from those of others; equal on all ranks.
        answer: What this rank answers; called in a thread of its own, and kept until no rank can
            ask any more.
    """

    def __init__(self, name: str, answer: Callable[[], bytes]) -> None:
        self._answer = answer
        self._rank = rank()
        self._secret = tell_all(os.urandom(32), f"peers.{name}")
        self._listener = socket.create_server((own_address(name), 0), backlog=size())
        own = "{}:{}".format(*self._listener.getsockname())
        addresses = [text.rpartition(":") for text in gather_texts(own, f"addresses.{name}")]
        self._addresses = [(host, int(port)) for host, _, port in addresses]
        self._leaving = threading.Event()
        #: Connections of others, as long as somebody answers them.
        self._asking: set[socket.socket] = set()
        threading.Thread(target=self._serve, name="hvd_autosync peers", daemon=True).start()
        atexit.register(self._linger)

    def retire(self) -> None:
        """Answer until every other rank has retired or ended, and no longer."""
        self._leaving.set()
        threading.Thread(target=self._retire, name="hvd_autosync retires", daemon=True).start()

    def ask_all(self) -> list[bytes]:
        """The answers of all other ranks.

        Raises:
            AutosyncError: A rank cannot be reached, or is not who it should be.
        """
        answers = []
        for other in self._others():
            try:
                answers.append(self._ask(other, _STATES))
            except OSError as error:
                raise AutosyncError(
                    f"rank {other} does not tell its part of the optimizer's state: {error}",
                    hint="Call optimizer.state_dict() before any rank ends.",
                ) from None
        return answers

    def _retire(self) -> None:
        self._await_others()
        atexit.unregister(self._linger)
        self._close()

    def _linger(self) -> None:
        """At the end of this process: answer until every other rank has retired or ended."""
        failed = hasattr(sys, "last_value")  # of an error that nobody caught: end at once
        self._leaving.set()
        if not failed:
            # Whoever still waits for a collective of this rank would wait for ever.
            shutdown()
            self._await_others()
        # The threads that answer end with the interpreter, but not what they have open: MPI may
        # wait in its own end for a rank that waits for an answer.
        self._close()

    def _close(self) -> None:
        """Answer nobody any more; who still waits for an answer knows from that."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), as close() does not
        self._listener.close()
        for connection in list(self._asking):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _await_others(self) -> None:
        for other in self._others():
            with contextlib.suppress(OSError):  # of a rank that is gone already
                self._ask(other, _END)

    def _others(self) -> list[int]:
        return [other for other in range(len(self._addresses)) if other != self._rank]

    def _ask(self, other: int, question: bytes) -> bytes:
        with socket.create_connection(self._addresses[other], _HANDSHAKE_S) as connection:
            theirs = read_exactly(connection, _NONCE_BYTES)
            own = os.urandom(_NONCE_BYTES)
            connection.sendall(question + own + self._mac(b"ask", theirs, own, question))
            connection.settimeout(None)
            keep_alive(connection)
            (length,) = _LENGTH.unpack(read_exactly(connection, _LENGTH.size))
            answer = read_exactly(connection, length)
            mac = read_exactly(connection, _MAC_BYTES)
        if not hmac.compare_digest(mac, self._mac(b"tell", theirs, own, answer)):
            raise OSError("its answer is not signed")
        return answer

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._reply, args=(connection,), daemon=True).start()

    def _reply(self, connection: socket.socket) -> None:
        self._asking.add(connection)
        with connection:
            with contextlib.suppress(OSError):  # of a stranger, or one who is gone
                self._reply_to(connection)
            self._asking.discard(connection)

    def _reply_to(self, connection: socket.socket) -> None:
        connection.settimeout(_HANDSHAKE_S)
        own = os.urandom(_NONCE_BYTES)
        connection.sendall(own)
        question = read_exactly(connection, 1)
        theirs = read_exactly(connection, _NONCE_BYTES)
        mac = read_exactly(connection, _MAC_BYTES)
        if not hmac.compare_digest(mac, self._mac(b"ask", own, theirs, question)):
            return
        connection.settimeout(None)
        keep_alive(connection)
        if question == _END:
            self._leaving.wait()
        answer = self._answer() if question == _STATES else b""
        connection.sendall(_LENGTH.pack(len(answer)))
        connection.sendall(answer)
        connection.sendall(self._mac(b"tell", own, theirs, answer))

    def _mac(self, direction: bytes, asked: bytes, asking: bytes, text: bytes) -> bytes:
        return hmac.digest(self._secret, direction + asked + asking + text, hashlib.sha256)
