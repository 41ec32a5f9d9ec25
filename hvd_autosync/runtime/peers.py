"""Questions that ranks put to each other while these do something else.

Collectives need all ranks at the same place of the script. A script that saves its optimizer on
rank 0 alone is at no such place: the other ranks train on, or wait in a collective of their own.
So each rank answers from a thread. It listens on the job's network only, and only to those who
prove, in each connection, that they know a secret which Horovod's own connections carried to them.

    asked -> asking   nonce (32 bytes)
    asking -> asked   question (1 byte) | nonce (32) | mac (32)
    asked -> asking   length (8) | mac (32) | answer | mac (32)

Macs are HMAC-SHA256 over direction, both nonces and text, so nothing can be forged or replayed.
Answers are not encrypted, as what Horovod itself sends is not. Strangers cannot keep ranks from
each other (:mod:`hvd_autosync.admission`): who has to make room for a crowd asks again.
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

from horovod.torch.mpi_ops import rank, shutdown, size

from hvd_autosync.admission import HANDSHAKE_S, NONCE_BYTES, Admission, Admitted
from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.addresses import own_address
from hvd_autosync.runtime.agreement import gather_texts, tell_all
from hvd_autosync.sockets import keep_alive, read_exactly, time_left

_STATES, _END = b"s", b"e"
_LENGTH = struct.Struct("!Q")
_MAC_BYTES = 32
#: A question, a nonce and a mac.
_PROOF_BYTES = 1 + NONCE_BYTES + _MAC_BYTES
_AGAIN_S = 0.02


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
        self._port = Admission(own_address(name), _PROOF_BYTES, self._proves, backlog=size())
        own = "{}:{}".format(*self._port.address)
        addresses = [text.rpartition(":") for text in gather_texts(own, f"addresses.{name}")]
        self._addresses = [(host, int(port)) for host, _, port in addresses]
        self._leaving = threading.Event()
        #: Connections of others, as long as somebody answers them.
        self._asking: set[socket.socket] = set()
        self._serving = threading.Thread(
            target=self._serve, name="hvd_autosync peers", daemon=True
        )
        self._serving.start()
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
        self._port.close()
        # It may be about to take somebody in, whom nobody would answer nor turn away.
        self._serving.join()
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
        """The other rank's answer; it is asked again where a crowd of strangers was in the way."""
        deadline = monotonic() + HANDSHAKE_S
        while True:
            try:
                return self._ask_once(other, question, deadline)
            except ConnectionRefusedError:  # it is gone
                raise
            except ConnectionError:
                if monotonic() > deadline:
                    raise
                sleep(_AGAIN_S)

    def _ask_once(self, other: int, question: bytes, deadline: float) -> bytes:
        with socket.create_connection(self._addresses[other], time_left(deadline)) as connection:
            theirs = read_exactly(connection, NONCE_BYTES, deadline)
            own = os.urandom(NONCE_BYTES)
            connection.sendall(question + own + self._mac(b"ask", theirs, own, question))
            connection.settimeout(None)
            keep_alive(connection)

            def read(direction: bytes, count: int) -> bytes:
                text = read_exactly(connection, count)
                mac = read_exactly(connection, _MAC_BYTES)
                if not hmac.compare_digest(mac, self._mac(direction, theirs, own, text)):
                    raise OSError("its answer is not signed")
                return text

            (length,) = _LENGTH.unpack(read(b"long", _LENGTH.size))
            return read(b"tell", length)

    def _serve(self) -> None:
        while (asking := self._port.wait()) is not None:
            self._asking.add(asking.connection)
            try:
                threading.Thread(target=self._reply, args=(asking,), daemon=True).start()
            except RuntimeError:  # no thread is left: it asks again
                self._asking.discard(asking.connection)
                asking.connection.close()

    def _reply(self, asking: Admitted) -> None:
        with asking.connection as connection:
            with contextlib.suppress(OSError):  # of one who is gone
                self._reply_to(connection, asking)
            self._asking.discard(connection)

    def _reply_to(self, connection: socket.socket, asking: Admitted) -> None:
        question, theirs, _ = self._parts(asking.proof)
        keep_alive(connection)
        if question == _END:
            self._leaving.wait()
        answer = self._answer() if question == _STATES else b""
        for direction, text in ((b"long", _LENGTH.pack(len(answer))), (b"tell", answer)):
            connection.sendall(text)
            connection.sendall(self._mac(direction, asking.nonce, theirs, text))

    def _proves(self, own: bytes, proof: bytes) -> bool:
        question, theirs, mac = self._parts(proof)
        return hmac.compare_digest(mac, self._mac(b"ask", own, theirs, question))

    @staticmethod
    def _parts(proof: bytes) -> tuple[bytes, bytes, bytes]:
        """Question, nonce and mac."""
        return proof[:1], proof[1:-_MAC_BYTES], proof[-_MAC_BYTES:]

    def _mac(self, direction: bytes, asked: bytes, asking: bytes, text: bytes) -> bytes:
        return hmac.digest(self._secret, direction + asked + asking + text, hashlib.sha256)
