"""A port with real sockets: peers are accepted, unauthenticated connections are dropped."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvd_autosync.util import authentication
from hvd_autosync.util.authentication import AuthenticatedPort
from hvd_autosync.util.connection import PROOF_BYTES, Connection, connect

SECRET = b"s" * 32
#: More than any wait here takes on a busy machine.
LONG_S = 120.0
Crowd = Callable[..., list[socket.socket]]


@pytest.fixture
def port() -> Iterator[AuthenticatedPort]:
    made = AuthenticatedPort("127.0.0.1", SECRET)
    yield made
    made.close()
    made.wait()


def until(done: Callable[[], bool]) -> None:
    """Wait for ``done``."""
    deadline = time.monotonic() + LONG_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def enter(address: tuple[str, int]) -> Connection:
    """A peer, who comes again where there was no room."""
    return connect(address, SECRET, time.monotonic() + LONG_S)


@pytest.mark.parametrize("manner", ["silent", "drip", "garbage"])
def test_peers_come_in_through_a_crowd(port: AuthenticatedPort, manner: str, crowd: Crowd) -> None:
    crowd(port.address, manner, 300)
    with ThreadPoolExecutor() as pool:
        entering = [pool.submit(enter, port.address) for _ in range(3)]
        for _ in entering:
            admitted = port.wait(LONG_S)
            assert admitted is not None
            assert len(port._pending) <= authentication._MOST
            admitted.close()
        for peer in entering:
            peer.result().close()


def test_who_talks_slowly_has_no_more_time(
    port: AuthenticatedPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(authentication, "HANDSHAKE_S", 0.4)
    monkeypatch.setattr(authentication, "monotonic", lambda: now_s)
    waiting = threading.Thread(target=port.wait, daemon=True)
    waiting.start()
    with socket.create_connection(port.address) as slow:
        until(lambda: bool(port._pending))
        (pending,) = port._pending.values()

        def say(count: int) -> None:
            """One at a time: what arrives is looked at with the time of then."""
            for _ in range(count):
                said = len(pending.received)
                slow.send(b"x")
                until(lambda said=said: len(pending.received) > said)  # type: ignore[misc]

        say(1)
        now_s = 0.3
        say(2)
        assert port._pending
        now_s = 0.5
        until(lambda: not port._pending)
        assert len(pending.received) == 3 < PROOF_BYTES
    port.close()
    waiting.join(LONG_S)
    assert not waiting.is_alive()


def test_the_clock_of_the_day_sets_no_deadline(
    port: AuthenticatedPort, monkeypatch: pytest.MonkeyPatch, crowd: Crowd
) -> None:
    crowd(port.address, "silent", 1)
    while not port._pending:
        assert port.wait(0.1) is None
    for day in (1e9, 2e9, 0.0):
        monkeypatch.setattr("time.time", lambda day=day: day)
        assert port.wait(0.1) is None and len(port._pending) == 1


def test_close_ends_the_wait_from_another_thread(port: AuthenticatedPort, crowd: Crowd) -> None:
    crowd(port.address, "silent", authentication._MOST + 10)
    where = port.address
    waiting = threading.Thread(target=port.wait)
    waiting.start()
    port.close()
    waiting.join(LONG_S)
    assert not waiting.is_alive() and not port._pending
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where)


POOR = """
import os, resource, sys
from hvd_autosync.util.authentication import AuthenticatedPort

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
port = AuthenticatedPort("127.0.0.1", b"s" * 32)
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(int(sys.argv[1]))]
print(port.address[1], flush=True)
while (peer := port.wait()) is not None:
    peer.close()
    while held:  # nothing was left, as long as somebody waited in vain
        os.close(held.pop())
"""


@pytest.mark.parametrize("held", [0, 50])
def test_a_process_without_descriptors_goes_on(held: int, crowd: Crowd) -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-c", POOR, str(held)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(process.kill)
        assert process.stdout is not None
        address = ("127.0.0.1", int(process.stdout.readline()))
        crowd(address, "silent", 200)
        for _ in range(3):
            enter(address).close()
        assert process.poll() is None
