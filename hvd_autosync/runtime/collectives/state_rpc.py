"""State RPC: a rank fetches the states of the others while these do something else.

Collectives need all ranks at the same place of the script. A script that saves its optimizer on
rank 0 alone is at no such place: the other ranks train on, or wait in a collective of their own. So
each rank serves its state from a thread. It listens on the job's network only, and answers only
clients that know a secret that Horovod's own connections distributed
(:mod:`hvd_autosync.util.authentication`). On each connection the client sends one request, of one
byte, and the server answers (:mod:`hvd_autosync.util.connection`)::

    request for the state      "s", then the state; or "f", then message and hint of an error (JSON)
    request to tell the end    an empty message, once this rank has closed or ends
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from time import monotonic

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.collectives.addresses import own_address
from hvd_autosync.runtime.collectives.agreement import gather_texts, on_all, tell_all
from hvd_autosync.runtime.collectives.operations import rank, shutdown, size
from hvd_autosync.util.authentication import HANDSHAKE_S, AuthenticatedPort
from hvd_autosync.util.connection import Connection, connect, retry_until

_STATES, _END = b"s", b"e"
#: First message of an answer: the state follows, or why there is none.
_STATE, _FAILURE = b"s", b"f"


class StateServer:
    """Serves this rank's state to the others, and fetches theirs; creating it is a collective.

    Args:
        name: Distinguishes the operations of this object from those of others; equal on all ranks.
        answer: Returns this rank's state; called in a thread of its own, and kept until no rank can
            ask any more.

    Raises:
        AutosyncError: Some rank has no address or port for the others; raised on all ranks.
    """

    def __init__(self, name: str, answer: Callable[[], bytes]) -> None:
        self._answer = answer
        self._rank = rank()
        self._secret = tell_all(os.urandom(32), f"peers.{name}")
        self._port = on_all(
            lambda: AuthenticatedPort(own_address(name), self._secret, backlog=size()),
            f"ports.{name}",
            "ranks cannot serve their parts of the optimizer's state",
            "Let the hosts of the job reach each other on any port of the job's network, or choose "
            "a strategy under which every rank has the whole state.",
        )
        own = "{}:{}".format(*self._port.address)
        addresses = [text.rpartition(":") for text in gather_texts(own, f"addresses.{name}")]
        self._addresses = [(host, int(port)) for host, _, port in addresses]
        self._closing = threading.Event()
        #: Open connections of clients.
        self._clients: set[Connection] = set()
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
            AutosyncError: A rank cannot be reached, fails authentication, or cannot send its state.
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
                connection.interrupt()

    def _await_others(self) -> None:
        for other in self._others():
            with contextlib.suppress(OSError):  # the rank is gone already
                self._request(other, _END)

    def _others(self) -> list[int]:
        return [other for other in range(len(self._addresses)) if other != self._rank]

    def _request(self, other: int, request: bytes) -> bytes:
        """Return the other rank's answer; retries if that rank could not serve the connection.

        Raises:
            AutosyncError: It has answered that it cannot send its state.
        """
        deadline = monotonic() + HANDSHAKE_S

        def ask() -> bytes:
            with connect(self._addresses[other], self._secret, deadline) as connection:
                connection.send(request)
                if request == _STATES and connection.receive() == _FAILURE:
                    message, hint = json.loads(connection.receive())
                    raise AutosyncError(
                        f"cannot fetch rank {other}'s part of the optimizer's state: {message}",
                        hint=hint,
                    )
                return connection.receive()

        return retry_until(deadline, ask)

    def _serve(self) -> None:
        while (client := self._port.wait()) is not None:
            self._clients.add(client)
            try:
                threading.Thread(target=self._reply, args=(client,), daemon=True).start()
            except RuntimeError:  # no thread could be started: the client retries
                self._clients.discard(client)
                client.close()

    def _reply(self, client: Connection) -> None:
        with client:
            with contextlib.suppress(OSError):  # the client is gone
                request = client.receive()
                if request == _STATES:
                    for message in self._state():
                        client.send(message)
                else:
                    if request == _END:
                        self._closing.wait()
                    client.send(b"")
            self._clients.discard(client)

    def _state(self) -> tuple[bytes, bytes]:
        """Return the messages that answer a request for the state."""
        try:
            return _STATE, self._answer()
        except AutosyncError as error:
            failure = error.message, error.hint
        except Exception as error:
            failure = f"{type(error).__name__}: {error}", ""
        return _FAILURE, json.dumps(failure).encode()
