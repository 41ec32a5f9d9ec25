"""The state server of a rank, with unauthenticated clients, without a job."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("horovod.torch")

from hvd_autosync.errors import AutosyncError, ConfigurationError
from hvd_autosync.runtime.collectives import state_rpc as module
from hvd_autosync.runtime.collectives.state_rpc import StateServer
from hvd_autosync.util.authentication import AuthenticatedPort
from hvd_autosync.util.connection import Connection

POOR = Path(__file__).parents[1] / "workers" / "poor_peer.py"
SECRET = os.urandom(32)
#: More than any wait here takes on a busy machine.
LONG_S = 120.0
Crowd = Callable[..., list[socket.socket]]
Make = Callable[[int, list[str], bytes], StateServer]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``make(rank, addresses, answer)``: one rank; its own address, where it has one, is added."""
    made: list[StateServer] = []

    def peers(rank: int, addresses: list[str], answer: bytes) -> StateServer:
        monkeypatch.setattr(module, "HANDSHAKE_S", LONG_S)
        monkeypatch.setattr(module, "rank", lambda: rank)
        monkeypatch.setattr(module, "size", lambda: 2)
        monkeypatch.setattr(module, "tell_all", lambda text, name: SECRET)
        monkeypatch.setattr(module, "gather_texts", lambda own, name: [*addresses, own][:2])
        monkeypatch.setattr(module, "own_address", lambda name: "127.0.0.1")
        monkeypatch.setattr(module, "on_all", lambda make, *_: make())
        made.append(StateServer("test", lambda: answer))
        atexit.unregister(made[-1]._drain)
        return made[-1]

    yield peers
    for each in made:
        each._close_port()


def written(peers: StateServer) -> str:
    return "{}:{}".format(*peers._port.address)


@pytest.mark.parametrize("manner", ["silent", "drip", "garbage"])
def test_a_rank_is_answered_beside_a_crowd(make: Make, manner: str, crowd: Crowd) -> None:
    asked = make(0, [], b"state of rank 0")
    asking = make(1, [written(asked)], b"state of rank 1")
    crowd(asked._port.address, manner, 300)
    for _ in range(3):
        assert asking.fetch_all() == [b"state of rank 0"]


def test_a_rank_that_is_gone_is_not_waited_for(make: Make) -> None:
    asked = make(0, [], b"")
    asking = make(1, [written(asked)], b"")
    asked._close_port()
    with pytest.raises(AutosyncError, match=r"cannot fetch rank 0.*refused"):
        asking.fetch_all()


@pytest.mark.parametrize(
    ("error", "text", "hint"),
    [
        (ConfigurationError("no such state", hint="Do this."), "no such state", "Do this."),
        (KeyError("exp_avg"), "KeyError: 'exp_avg'", ""),
    ],
)
def test_a_rank_that_cannot_send_its_state_says_why(
    make: Make, error: Exception, text: str, hint: str
) -> None:
    """At once: it is asked again only where it could not serve the connection."""

    def fail() -> bytes:
        raise error

    asked = make(0, [], b"")
    asked._answer = fail
    asking = make(1, [written(asked)], b"")
    with pytest.raises(AutosyncError) as raised:
        asking.fetch_all()
    assert raised.value.message == f"cannot fetch rank 0's part of the optimizer's state: {text}"
    assert raised.value.hint == hint


def test_a_client_that_connects_while_a_rank_ends_is_turned_away(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where MPI keeps a process in its finalization, no thread answers and nothing is closed."""
    waits, closes = AuthenticatedPort.wait, AuthenticatedPort.close
    came, closed = threading.Event(), threading.Event()

    def wait(port: AuthenticatedPort) -> Connection | None:
        peer = waits(port)
        if peer is not None:
            came.set()
            assert closed.wait(LONG_S)
        return peer

    def close(port: AuthenticatedPort) -> None:
        closes(port)
        closed.set()

    monkeypatch.setattr(AuthenticatedPort, "wait", wait)
    monkeypatch.setattr(AuthenticatedPort, "close", close)
    monkeypatch.setattr(StateServer, "_reply", lambda self, client: None)
    asked = make(0, [], b"")
    asking = make(1, [written(asked)], b"")
    leaving = threading.Thread(target=asking._await_others, daemon=True)
    leaving.start()
    assert came.wait(LONG_S)
    asked._close_port()
    leaving.join(LONG_S)
    assert not leaving.is_alive()


def test_who_took_the_port_of_a_rank_that_is_gone_cannot_fill_the_memory(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asking = make(1, ["{}:{}".format(*listener.getsockname())], b"")
        with contextlib.ExitStack() as stack:

            def answer() -> None:
                connection = stack.enter_context(listener.accept()[0])
                connection.sendall(b"n" * 32 + b"\xff" * 8 + b"m" * 64)

            thread = threading.Thread(target=answer)
            thread.start()
            with pytest.raises(AutosyncError, match="does not know the secret"):
                asking.fetch_all()
            thread.join()


def test_a_rank_with_few_descriptors_answers_as_long_as_it_lives(make: Make, crowd: Crowd) -> None:
    """Where they were spent, the thread that answers ended, and stayed so."""
    with (
        subprocess.Popen(
            [sys.executable, str(POOR), SECRET.hex()], stdout=subprocess.PIPE
        ) as process,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(process.kill)
        assert process.stdout is not None
        where = process.stdout.readline().decode().strip()
        asking = make(1, [where], b"")
        host, _, port = where.partition(":")
        crowd_connections = crowd((host, int(port)), "silent", 200)
        deadline = time.monotonic() + LONG_S
        while len(os.listdir(f"/proc/{process.pid}/fd")) < 60:
            assert time.monotonic() < deadline, "the crowd is not large enough"
            time.sleep(0.01)
        assert asking.fetch_all() == [b"poor"]
        for connection in crowd_connections:
            connection.close()
        assert asking.fetch_all() == [b"poor"]
