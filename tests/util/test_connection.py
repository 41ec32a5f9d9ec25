"""Messages over real sockets: of any size, in parts, forged, too long, too late."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from hvd_autosync.util.authentication import AuthenticatedPort
from hvd_autosync.util.connection import AuthenticationError, Connection, connect, retry_until
from hvd_autosync.util.sockets import read_exactly

SECRET = os.urandom(32)


def soon(seconds: float = 120.0) -> float:
    return time.monotonic() + seconds


class Middle:
    """Sits between a peer and its port, and passes on what it is told to, in small parts."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._to = address

    def shake_hands(self) -> None:
        """The nonce of the port, the proof of the peer, the proof of the port."""
        self.near, _ = self._listener.accept()
        self.far = socket.create_connection(self._to)
        for source, to, count in (
            (self.far, self.near, 32),
            (self.near, self.far, 64),
            (self.far, self.near, 32),
        ):
            self.drip(to, read_exactly(source, count))

    @staticmethod
    def drip(to: socket.socket, text: bytes) -> None:
        to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(text), 7):
            to.sendall(text[start : start + 7])
            time.sleep(0.001)

    def message(self, source: socket.socket) -> bytes:
        """The next message as it is sent."""
        length = read_exactly(source, 8)
        return length + read_exactly(source, 64 + struct.unpack("!Q", length)[0])

    def close(self) -> None:
        for each in (self._listener, self.near, self.far):
            each.close()


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    """The connection of a port and that of its peer."""
    port = AuthenticatedPort("127.0.0.1", SECRET)
    with ThreadPoolExecutor() as pool:
        entering = pool.submit(connect, port.address, SECRET, soon())
        ours = port.wait(120)
        assert ours is not None
        yield ours, entering.result()
    ours.close()
    entering.result().close()
    port.close()


@pytest.fixture
def middle() -> Iterator[tuple[Connection, Connection, Middle]]:
    """The two, with somebody between them."""
    port = AuthenticatedPort("127.0.0.1", SECRET)
    between = Middle(port.address)
    shaking = threading.Thread(target=between.shake_hands)
    shaking.start()
    with ThreadPoolExecutor() as pool:
        entering = pool.submit(connect, between.address, SECRET, soon())
        ours = port.wait(120)
        shaking.join()
        assert ours is not None
        yield ours, entering.result(), between
    ours.close()
    entering.result().close()
    between.close()
    port.close()


@pytest.mark.parametrize("size", [0, 1, 8, 65_535, 1 << 24])
def test_messages_of_any_size_arrive_in_both_directions(
    pair: tuple[Connection, Connection], size: int
) -> None:
    text = os.urandom(size)
    for sender, receiver in (pair, pair[::-1]):
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(sender.send, memoryview(text))
            assert receiver.receive() == text
            sending.result()
        sender.send(b"end")
        assert receiver.receive(deadline=soon()) == b"end"


def test_both_may_send_at_once(pair: tuple[Connection, Connection]) -> None:
    text = os.urandom(1 << 23)
    with ThreadPoolExecutor() as pool:
        futures: list[Future[None]] = [pool.submit(each.send, text) for each in pair]
        received = [pool.submit(each.receive) for each in pair]
        assert all(each.result() == text for each in received)
        for future in futures:
            future.result()


def test_messages_in_parts_are_put_together(middle: tuple[Connection, Connection, Middle]) -> None:
    ours, theirs, between = middle
    theirs.send(b"a message in parts" * 20)
    theirs.send(b"")
    for _ in range(2):
        between.drip(between.far, between.message(between.near))
    assert ours.receive() == b"a message in parts" * 20
    assert ours.receive() == b""


def flipped(place: int) -> Callable[[list[bytes]], bytes]:
    def flip(sent: list[bytes]) -> bytes:
        changed = bytearray(sent[1])
        changed[place] ^= 1
        return bytes(changed)

    return flip


ATTACKS: dict[str, Callable[[list[bytes]], bytes]] = {
    "changed length": flipped(7),
    "huge length": lambda sent: b"\xff" * 8 + sent[1][8:],
    "changed MAC of the length": flipped(8),
    "changed text": flipped(41),
    "changed MAC of the text": flipped(-1),
    "replayed": lambda sent: sent[0],
    "left out": lambda sent: sent[2],
    "length of one, text of another": lambda sent: sent[1][:40] + sent[2][40:],
    "not signed": lambda sent: sent[1][:8] + bytes(32) + sent[1][40:-32] + bytes(32),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_the_other_side_has_not_sent_is_refused(
    middle: tuple[Connection, Connection, Middle], attack: str
) -> None:
    ours, theirs, between = middle
    sent = []
    for text in (b"zero", b"_one", b"_two"):
        theirs.send(text)
        sent.append(between.message(between.near))
    between.far.sendall(sent[0])
    assert ours.receive() == b"zero"
    between.far.sendall(ATTACKS[attack](sent))
    with pytest.raises(AuthenticationError, match="signature"):
        ours.receive(deadline=soon())


def test_own_messages_that_come_back_are_refused(
    middle: tuple[Connection, Connection, Middle],
) -> None:
    ours, _, between = middle
    ours.send(b"order")
    between.far.sendall(between.message(between.far))
    with pytest.raises(AuthenticationError):
        ours.receive(deadline=soon())


def test_messages_of_another_connection_are_refused(
    middle: tuple[Connection, Connection, Middle], pair: tuple[Connection, Connection]
) -> None:
    ours, theirs, between = middle
    other, _ = pair
    theirs.send(b"first here, and first there")
    sock = socket.socket(fileno=os.dup(pair[1].fileno()))
    with sock:
        sock.sendall(between.message(between.near))
        with pytest.raises(AuthenticationError):
            other.receive(deadline=soon())
    assert ours is not other


def test_a_message_beyond_the_limit_is_refused_before_it_is_read(
    pair: tuple[Connection, Connection],
) -> None:
    ours, theirs = pair
    theirs.send(b"x" * 10)
    assert ours.receive(most_bytes=10) == b"x" * 10
    theirs.send(b"x" * 11)
    with pytest.raises(AuthenticationError, match=r"has 11 bytes; the limit is 10"):
        ours.receive(most_bytes=10)


def test_a_deadline_is_for_the_whole_message(middle: tuple[Connection, Connection, Middle]) -> None:
    ours, theirs, between = middle
    theirs.send(b"x" * 4000)
    sent, over = between.message(between.near), threading.Event()

    def drip() -> None:  # which would take minutes
        for byte in sent[8:]:
            between.far.sendall(bytes([byte]))
            if over.wait(0.05):
                return

    between.far.sendall(sent[:8])
    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(TimeoutError):
            ours.receive(deadline=soon(0.2))
    finally:
        over.set()
        dripping.join()


def test_the_end_of_the_connection_inside_a_message(
    middle: tuple[Connection, Connection, Middle],
) -> None:
    ours, theirs, between = middle
    theirs.send(b"never complete")
    between.far.sendall(between.message(between.near)[:-1])
    between.far.close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        ours.receive()


def test_an_interrupt_wakes_who_waits(pair: tuple[Connection, Connection]) -> None:
    ours, theirs = pair
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(each.receive) for each in pair]
        time.sleep(0.1)
        ours.interrupt()
        for each in waiting:
            with pytest.raises(ConnectionError):
                each.result(120)
    with pytest.raises(OSError, match=r"pipe|closed|reset|endpoint"):
        for _ in range(3):
            theirs.send(b"x")


def test_who_has_another_secret_is_not_let_in() -> None:
    port = AuthenticatedPort("127.0.0.1", SECRET)
    with ThreadPoolExecutor() as pool:
        entering = pool.submit(connect, port.address, os.urandom(32), soon(0.2))
        assert port.wait(0.4) is None
        with pytest.raises(OSError, match=r"closed the connection|timed out"):
            entering.result()
    port.close()


@pytest.mark.parametrize("proof", ["of the peer, sent back", "of nothing"])
def test_a_listener_without_the_secret_gets_no_message(proof: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        entering = pool.submit(connect, listener.getsockname(), SECRET, soon())
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"n" * 32)
            theirs = read_exactly(sock, 64)
            sock.sendall(theirs[32:] if proof == "of the peer, sent back" else bytes(32))
            with pytest.raises(AuthenticationError, match="does not know the secret"):
                entering.result()
            assert sock.recv(1) == b""


def test_a_proof_is_good_for_its_nonce_alone() -> None:
    port = AuthenticatedPort("127.0.0.1", SECRET)
    with ThreadPoolExecutor() as pool, socket.create_server(("127.0.0.1", 0)) as listener:
        entering = pool.submit(connect, listener.getsockname(), SECRET, soon())
        near, _ = listener.accept()
        far = socket.create_connection(port.address)
        waiting = pool.submit(port.wait, 120)
        with near, far, socket.create_connection(port.address) as later:
            near.sendall(read_exactly(far, 32))
            proof = read_exactly(near, 64)
            read_exactly(later, 32)
            later.sendall(proof)
            assert later.recv(1) == b""
            far.sendall(proof)
            accepted = waiting.result()
            assert accepted is not None
            near.sendall(read_exactly(far, 32))
            entering.result().close()
            accepted.close()
    port.close()


def test_a_port_that_says_nothing_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        connect(listener.getsockname(), SECRET, soon(0.3))


def test_nobody_listens() -> None:
    with socket.socket() as bound:  # so that nobody else listens there either
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            connect(bound.getsockname(), SECRET, soon())


def test_only_a_closed_connection_is_tried_again() -> None:
    tries: list[int] = []

    def third() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionResetError
        return "in"

    assert retry_until(soon(), third) == "in"

    def fail() -> str:
        tries.append(1)
        raise AuthenticationError("no")

    with pytest.raises(AuthenticationError):
        retry_until(soon(), fail)
    assert len(tries) == 4
