"""Message endpoints over ZeroMQ: several in one process, and with a peer process that ends."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

zmq = pytest.importorskip("zmq")

from hvd_autosync.errors import AutosyncError  # noqa: E402
from hvd_autosync.runtime.collectives import endpoint as module  # noqa: E402
from hvd_autosync.runtime.collectives import transport_zmq  # noqa: E402
from hvd_autosync.runtime.collectives.endpoint import Endpoint, MessageHandler  # noqa: E402
from hvd_autosync.runtime.collectives.shutdown import FAILURE  # noqa: E402
from hvd_autosync.runtime.collectives.transport import TransportMessage  # noqa: E402
from hvd_autosync.runtime.collectives.transport_zmq import ZmqTransport  # noqa: E402

PEER = Path(__file__).parents[1] / "workers" / "messages_peer.py"
#: More than any wait here takes on a busy machine.
LONG_S = 120.0
Messages = list["queue.SimpleQueue[tuple[int, bytes, bytes]]"]


@pytest.fixture(autouse=True)
def _last_words_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late a thread gets a processor."""
    for name in ("_ABORT_TIMEOUT_S", "_FLUSH_TIMEOUT_S"):
        monkeypatch.setattr(module, name, LONG_S)


def until(done: Callable[[], bool]) -> None:
    """Wait for ``done``."""
    deadline = time.monotonic() + LONG_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def failure(endpoint: Endpoint) -> str:
    """What ``check`` raises, once it raises."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        try:
            endpoint.check()
        except AutosyncError as error:
            return error.message
        time.sleep(0.005)
    raise AssertionError("all is well")


def in_turn(messages: Messages) -> Callable[[int, int, bytes, memoryview], None]:
    """A message handler that keeps what each rank receives."""

    def on_message(own: int, source: int, head: bytes, body: memoryview) -> None:
        messages[own].put((source, head, bytes(body)))

    return on_message


@contextlib.contextmanager
def endpoints(count: int, on_message: Callable[..., None]) -> Iterator[list[Endpoint]]:
    """Connected endpoints of this process; ``on_message`` gets the receiving rank first."""
    transports = [ZmqTransport("127.0.0.1") for _ in range(count)]
    endpoint_infos = [transport.endpoint_info for transport in transports]
    for rank, transport in enumerate(transports):
        transport.connect(rank, endpoint_infos)

    def of_rank(rank: int) -> MessageHandler:
        return lambda *message: on_message(rank, *message)

    opened = [Endpoint(r, count, transport, of_rank(r)) for r, transport in enumerate(transports)]
    for each in opened:
        each.await_connections(LONG_S)
    try:
        yield opened
    finally:
        close_all(opened)


def close_all(opened: list[Endpoint]) -> None:
    def close(each: Endpoint) -> None:
        with contextlib.suppress(AutosyncError):
            each.close()

    threads = [threading.Thread(target=close, args=(each,)) for each in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert not any(each._thread.is_alive() for each in opened)


def test_messages_arrive_once_in_order_and_with_their_source() -> None:
    messages: Messages = [queue.SimpleQueue() for _ in range(3)]
    with endpoints(3, in_turn(messages)) as opened:

        def send_all(source: int, part: int) -> None:
            for number in range(50):
                for to in range(3):
                    head = f"{part} {number}".encode()
                    opened[source].send(to, head, memoryview(bytes([source]) * (number % 3)))

        threads = [threading.Thread(target=send_all, args=(s, p)) for s in range(3) for p in (0, 1)]
        for thread in threads:
            thread.start()
        for own in range(3):
            seen: dict[tuple[int, str], list[int]] = {}
            for _ in range(3 * 2 * 50):
                source, head, body = messages[own].get(timeout=LONG_S)
                part, number = head.decode().split()
                assert body == bytes([source]) * (int(number) % 3)
                seen.setdefault((source, part), []).append(int(number))
            assert seen == {(s, p): list(range(50)) for s in range(3) for p in "01"}
        close_all(opened)
    assert all(each.empty() for each in messages)


def test_large_messages_both_ways_at_once() -> None:
    size, chosen = 50 * 2**20, random.Random(5)
    bodies = [bytearray(chosen.randbytes(2**20) * 50) for _ in range(2)]
    arrived: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()

    def on_message(own: int, source: int, head: bytes, body: memoryview) -> None:
        arrived.put((own, len(body) == size and body == bodies[source]))

    with endpoints(2, on_message) as opened:
        for own in (0, 1):
            opened[own].send(1 - own, b"", memoryview(bodies[own]))
        assert sorted(arrived.get(timeout=LONG_S) for _ in range(2)) == [(0, True), (1, True)]


def test_many_shapes_of_body_come_back_from_within_on_message() -> None:
    messages: Messages = [queue.SimpleQueue() for _ in range(2)]
    opened: list[Endpoint] = []

    def on_message(own: int, source: int, head: bytes, body: memoryview) -> None:
        if head == b"echo":
            opened[own].send(source, b"reply", body)
        else:
            in_turn(messages)(own, source, head, body)

    with endpoints(2, on_message) as boxes:
        opened += boxes
        flat = memoryview(bytes(range(200)))
        for to in (0, 1):
            for body in (None, flat[:0], flat[:1], flat, flat.cast("I"), flat.cast("B", (20, 10))):
                boxes[0].send(to, b"echo", body)
                expected = b"" if body is None else body.tobytes()
                assert messages[0].get(timeout=LONG_S) == (to, b"reply", expected)
        with pytest.raises(ValueError, match="rank 2: the job has 2 ranks"):
            boxes[0].send(2, b"")


def test_close_delivers_all_messages_and_the_replies_to_them() -> None:
    handled, opened = [0, 0], []
    body = memoryview(bytes(300_000))

    def on_message(own: int, source: int, head: bytes, body: memoryview) -> None:
        if head == b"ask":
            time.sleep(0.002)  # slower than they come
            opened[own].send(source, b"reply", body)
        else:
            handled[own] += 1

    with endpoints(2, on_message) as boxes:
        opened += boxes
        for _ in range(100):
            boxes[0].send(1, b"ask", body)
        close_all(boxes)
        assert handled == [100, 0]
        boxes[0].close()  # once more is no harm
        with pytest.raises(AutosyncError, match="the endpoint is closed"):
            boxes[0].send(1, b"late")


def test_a_failure_is_known_everywhere_and_nothing_is_handled_after_it() -> None:
    messages: Messages = [queue.SimpleQueue() for _ in range(3)]

    def on_message(own: int, source: int, head: bytes, body: memoryview) -> None:
        if head == b"bad":
            raise KeyError("no such parameter")
        in_turn(messages)(own, source, head, body)

    with endpoints(3, on_message) as opened:
        for head in (b"good", b"bad", b"late"):
            opened[2].send(1, head)
        for each in opened:
            assert failure(each) == (
                "rank 1 failed to handle a message from rank 2: KeyError: 'no such parameter'"
            )
        with pytest.raises(AutosyncError) as raised:
            opened[1].check()
        assert isinstance(raised.value.__cause__, KeyError)
        assert messages[1].get(timeout=LONG_S)[1] == b"good" and messages[1].empty()
        opened[0].send(1, b"dropped")


class Breaks:
    """A transport that cannot receive, or cannot send to rank 0."""

    def __init__(self, receives: bool) -> None:
        self.awaited, self.lost = set[int](), dict[int, str]()
        self.receives = receives
        self.sent: list[tuple[int, bytes]] = []

    def send(self, to: int, text: bytes, body: memoryview) -> None:
        if self.receives and to == 0:
            raise OSError("too many messages")
        self.sent.append((to, text))

    def receive(self, most_s: float) -> list[TransportMessage]:
        if not self.receives:
            raise OSError("too many messages")
        return []

    def wake(self) -> None:
        """Nothing waits."""

    end = forget = wake


@pytest.mark.parametrize(("receives", "told"), [(False, [0, 2]), (True, [2])])
def test_the_others_hear_of_an_endpoint_that_fails_by_itself(
    monkeypatch: pytest.MonkeyPatch, receives: bool, told: list[int]
) -> None:
    """Under MPI no connection breaks. Those that can be told are, if another one cannot."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    transport = Breaks(receives)
    endpoint = Endpoint(1, 3, transport, lambda *message: None)
    if receives:
        endpoint.send(0, b"")
    until(lambda: not endpoint._thread.is_alive())
    said = "the message endpoint of rank 1 failed: OSError('too many messages')"
    assert failure(endpoint) == said
    assert sorted(transport.sent) == [(to, FAILURE + said.encode()) for to in told]


def test_close_raises_a_failure_that_check_has_not_raised() -> None:
    def on_message(own: int, source: int, head: bytes, body: memoryview) -> None:
        raise KeyError("no such parameter")

    with endpoints(2, on_message) as opened:
        opened[0].send(1, b"")
        until(lambda: opened[1]._failure is not None)
        with pytest.raises(AutosyncError, match="rank 1 failed to handle a message from rank 0"):
            opened[1].close()
        opened[1].close()


def test_a_rank_that_does_not_close_is_not_waited_for() -> None:
    with endpoints(3, lambda *message: None) as opened:
        said = "rank 0 closes its message endpoint, ranks [1, 2] do not"
        with pytest.raises(AutosyncError) as raised:
            opened[0].close(patience_s=0.1)
        assert [raised.value.message, failure(opened[1]), failure(opened[2])] == [said] * 3


@pytest.mark.parametrize(
    ("listener", "how"),
    [
        ("gone", "its address cannot be reached"),
        ("silent", "the handshake failed"),
        ("closing", "the handshake failed"),
        ("a rank of another job", "it rejects this rank's key"),
    ],
)
def test_a_listener_in_place_of_a_rank_is_reported(
    listener: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_zmq, "_FLUSH_TIMEOUT_MS", 50)  # nobody takes the rest
    if listener == "silent":
        monkeypatch.setattr(transport_zmq, "_HANDSHAKE_MS", 500)
    with contextlib.ExitStack() as opened:
        own, other = ZmqTransport("127.0.0.1"), ZmqTransport("127.0.0.1")
        opened.callback(other.end)
        endpoint_info = other.endpoint_info
        if listener != "a rank of another job":
            there = opened.enter_context(socket.socket())
            there.bind(("127.0.0.1", 0))
            if listener != "gone":  # else nobody can listen there
                there.listen()
            endpoint_info = json.dumps(
                [f"tcp://127.0.0.1:{there.getsockname()[1]}", json.loads(endpoint_info)[1]]
            )
        own.connect(0, [own.endpoint_info, endpoint_info])
        endpoint = Endpoint(0, 2, own, lambda *message: None)
        if listener == "closing":
            there.accept()[0].close()
        if listener == "a rank of another job":
            until(lambda: bool(other.receive(0.01)) or bool(own.lost))
        assert failure(endpoint).startswith(f"rank 1 is gone: {how}")
        endpoint.abort("")


@pytest.mark.parametrize("key", ["none", "own", "a rank's public one"])
def test_an_unauthenticated_client_gets_nothing(key: str) -> None:
    messages: Messages = [queue.SimpleQueue() for _ in range(2)]
    with endpoints(2, in_turn(messages)) as opened, zmq.Context() as context:
        endpoint, server = json.loads(opened[1]._transport.endpoint_info)
        client = context.socket(zmq.DEALER)
        if key != "none":
            public, secret = zmq.curve_keypair()
            if key != "own":
                public = json.loads(opened[0]._transport.endpoint_info)[1].encode()
            client.curve_publickey, client.curve_secretkey = public, secret
            client.curve_serverkey = server.encode()
        monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        client.connect(endpoint)
        client.send_multipart([b"Lforged", b""])
        assert monitor.poll(LONG_S * 1000)  # rejected
        client.disable_monitor()
        client.close(0)
        host, port = endpoint.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as noise:
            noise.sendall(random.Random(3).randbytes(5000))
            opened[0].send(1, b"genuine")
            assert messages[1].get(timeout=LONG_S) == (0, b"genuine", b"")
        assert messages[1].empty()
        opened[1].check()


class Peer:
    """Rank 1 of two in a process of its own, which ends on command; rank 0 is here."""

    def __init__(self, manner: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), manner],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        )
        transport = ZmqTransport("127.0.0.1")
        assert self.process.stdout
        endpoint_infos = [transport.endpoint_info, self.process.stdout.readline().strip()]
        self.tell(json.dumps(endpoint_infos))
        transport.connect(0, endpoint_infos)
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.endpoint = Endpoint(0, 2, transport, lambda *message: self.messages.put(message[:2]))
        self.endpoint.await_connections(LONG_S)
        self.said = self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()


@pytest.fixture
def peer() -> Iterator[Callable[[str], Peer]]:
    started: list[Peer] = []

    def start(manner: str) -> Peer:
        started.append(Peer(manner))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()
        with contextlib.suppress(AutosyncError):
            each.endpoint.close()


def test_a_killed_rank_is_named_even_if_it_leaves_a_child(peer: Callable[[str], Peer]) -> None:
    killed = peer("fork")
    child = int(killed.said)
    killed.process.kill()
    try:
        assert failure(killed.endpoint) == "rank 1 is gone: its connection broke"
        os.kill(child, 0)  # lives
    finally:
        os.kill(child, signal.SIGKILL)
    killed.endpoint.close()  # waits for no rank, and does not raise a failure again
    assert not killed.endpoint._thread.is_alive()


@pytest.mark.parametrize(
    ("manner", "status", "why"),
    [
        ("exit", 0, "without closing its message endpoint"),
        ("raise", 1, "after RuntimeError: bad data"),
    ],
)
def test_a_rank_that_ends_without_closing_ends(
    peer: Callable[[str], Peer], manner: str, status: int, why: str
) -> None:
    other = peer(manner)
    other.tell("end")
    assert failure(other.endpoint) == f"rank 1 has ended {why}"
    assert other.messages.get(timeout=LONG_S) == (1, b"last")
    assert other.process.wait(LONG_S) == status


def test_a_rank_ends_whose_message_handler_hangs(peer: Callable[[str], Peer]) -> None:
    other = peer("hang")
    other.endpoint.send(1, b"hang")
    assert other.messages.get(timeout=LONG_S) == (1, b"hanging")
    other.tell("end")
    assert other.process.wait(LONG_S) == 0
    assert failure(other.endpoint) == "rank 1 is gone: its connection broke"


def test_a_forked_child_has_no_endpoint_and_harms_none() -> None:
    messages: Messages = [queue.SimpleQueue() for _ in range(2)]
    with endpoints(2, in_turn(messages)) as opened:
        pid = os.fork()
        if pid == 0:
            code = 0
            for use in (opened[0].check, lambda: opened[0].send(1, b"from the child")):
                with contextlib.suppress(AutosyncError):
                    use()
                    code += 1
            opened[0].close()
            os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        opened[0].send(1, b"from the parent")
        assert messages[1].get(timeout=LONG_S) == (0, b"from the parent", b"")
        close_all(opened)
        for each in opened:
            each.check()


@pytest.mark.parametrize("manner", ["silent", "drip", "garbage"])
def test_messages_arrive_beside_a_crowd_of_which_few_stay(
    manner: str, crowd: Callable[..., list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_zmq, "_MAX_UNAUTHENTICATED", 8)
    monkeypatch.setattr(transport_zmq, "_GRACE_S", 0.05)
    messages: Messages = [queue.SimpleQueue() for _ in range(2)]
    with endpoints(2, in_turn(messages)) as opened:
        transport: Any = opened[0]._transport
        host, _, port = json.loads(transport.endpoint_info)[0].removeprefix("tcp://").partition(":")
        crowd_connections = crowd((host, int(port)), manner, 100)

        def few() -> bool:
            opened[1].send(0, b"through the crowd")
            assert messages[0].get(timeout=LONG_S) == (1, b"through the crowd", b"")
            return (
                sum(map(still_there, crowd_connections)) <= 8 and len(transport._connections) <= 10
            )

        until(few)
        assert len(transport._unauthenticated) <= 8
        for each in opened:
            each.check()


def still_there(connection: socket.socket) -> bool:
    """Whether the other side has not hung up."""
    try:
        while said := connection.recv(4096):
            pass
        return bool(said)
    except BlockingIOError:
        return True
    except OSError:
        return False


POOR = """
import queue, resource, sys, time
from hvd_autosync.runtime.collectives.transport_zmq import ZmqTransport
from hvd_autosync.runtime.collectives.endpoint import Endpoint

transport, received = ZmqTransport("127.0.0.1"), queue.SimpleQueue()
print(transport.endpoint_info, flush=True)
transport.connect(0, [transport.endpoint_info, sys.stdin.readline()])
endpoint = Endpoint(0, 2, transport, lambda *message: received.put(message))
while not transport._connections:
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print("poor", flush=True)
endpoint.await_connections(120)
print(received.get(timeout=120)[:2], flush=True)
"""


def test_a_rank_with_few_descriptors_is_reached_beside_a_crowd(
    crowd: Callable[..., list[socket.socket]],
) -> None:
    transport = ZmqTransport("127.0.0.1")
    with (
        subprocess.Popen(
            [sys.executable, "-c", POOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(process.kill)
        assert process.stdin is not None and process.stdout is not None
        endpoint_info = process.stdout.readline()
        process.stdin.write(f"{transport.endpoint_info}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "poor\n"
        host, _, port = json.loads(endpoint_info)[0].removeprefix("tcp://").partition(":")
        crowd((host, int(port)), "silent", 200)
        transport.connect(1, [endpoint_info, transport.endpoint_info])
        endpoint = Endpoint(1, 2, transport, lambda *message: None)
        endpoint.await_connections(LONG_S)
        endpoint.send(0, b"hello")
        assert process.stdout.readline() == "(1, b'hello')\n"
    with contextlib.suppress(AutosyncError):
        endpoint.close()
