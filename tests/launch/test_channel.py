"""Control messages over a real socket, authenticated and unauthenticated."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from hvd_autosync.launch import channel
from hvd_autosync.launch.channel import ChannelError, ControlReceiver, ControlSender, new_secret
from hvd_autosync.util import authentication
from hvd_autosync.util.sockets import read_exactly

SECRET = new_secret()


@pytest.fixture
def receiver() -> Iterator[ControlReceiver]:
    end = ControlReceiver("127.0.0.1", SECRET)
    yield end
    end.close()


def address(receiver: ControlReceiver) -> tuple[str, int]:
    return "127.0.0.1", receiver.port


def test_messages_arrive_in_order(receiver: ControlReceiver) -> None:
    where = address(receiver)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(receiver.accept, 120)
        sender = ControlSender(where, SECRET)
        sender.send({"type": "run", "n": 0})
        assert first.result() == {"type": "run", "n": 0}
    sender.send({"n": 1})
    sender.send({"n": 2})
    assert [receiver.receive()["n"] for _ in range(2)] == [1, 2]
    sender.close()
    with pytest.raises(ChannelError, match="closed the connection"):
        receiver.receive()


def test_nobody_is_listening_once_the_driver_is_there(receiver: ControlReceiver) -> None:
    where = address(receiver)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(receiver.accept, 120)
        ControlSender(where, SECRET).send({})
        first.result()
    with pytest.raises(ChannelError):
        ControlSender(where, SECRET)


def test_nobody_in_time(receiver: ControlReceiver) -> None:
    with pytest.raises(ChannelError, match="no driver"):
        receiver.accept(0.1)


def forged(text: bytes, mac: bytes = b"\0" * 32) -> bytes:
    return b"n" * 32 + mac + struct.pack("!Q", len(text)) + mac + text + mac


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        forged(b'{"type": "run"}'),
        forged(b"", b"x" * 32),
        struct.pack("!Q", 2**64 - 1) * 99,
    ],
)
def test_unauthenticated_clients_are_dropped_and_the_driver_still_gets_in(
    receiver: ControlReceiver, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = address(receiver)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(receiver.accept, 120)
        client = socket.create_connection(where)
        client.sendall(said)
        client.close()
        with monkeypatch.context() as patch, pytest.raises(ChannelError):
            patch.setattr(channel, "_HANDSHAKE_S", 0.1)
            ControlSender(where, new_secret())
        ControlSender(where, SECRET).send({"type": "run"})
        assert first.result() == {"type": "run"}


def test_one_who_says_nothing_holds_nobody_up_for_long(
    receiver: ControlReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "HANDSHAKE_S", 0.2)
    where = address(receiver)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(receiver.accept, 120)
        silent = socket.create_connection(where)
        assert len(silent.recv(32)) == 32
        assert silent.recv(1) == b""  # dropped
        ControlSender(where, SECRET).send({"type": "run"})
        assert first.result() == {"type": "run"}
        silent.close()


@pytest.mark.parametrize("manner", ["silent", "drip", "garbage"])
def test_a_crowd_keeps_no_driver_out(
    receiver: ControlReceiver,
    manner: str,
    crowd: Callable[..., list[socket.socket]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver connects last, and is accepted though the others never time out."""
    monkeypatch.setattr(authentication, "HANDSHAKE_S", 1e6)
    where = address(receiver)
    crowd_connections = crowd(where, manner, 300)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(receiver.accept, 120)
        sender = ControlSender(where, SECRET)
        sender.send({"type": "run"})
        assert first.result() == {"type": "run"}
    for client in crowd_connections:  # nobody else is kept
        client.setblocking(True)
        client.settimeout(120)
        with contextlib.suppress(ConnectionError):
            while client.recv(4096):
                pass
    sender.send({"n": 1})
    assert receiver.receive() == {"n": 1}


def test_somebody_else_at_the_port_is_not_taken_for_the_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        entering = pool.submit(ControlSender, listener.getsockname(), SECRET)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"n" * 32 + b"m" * 32)
            with pytest.raises(ChannelError, match="does not know the secret"):
                entering.result()


def test_a_long_message_waits_for_a_busy_receiver(
    receiver: ControlReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is larger than what the system keeps for the receiver until that reads."""
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 1 << 26)
    where = address(receiver)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(receiver.accept, 120)
        sender = ControlSender(where, SECRET)
        sender.send({})
        first.result()
        # The time of the handshake does not limit it.
        assert sender._connection._socket.gettimeout() is None
        sent = pool.submit(sender.send, {"spec": "x" * (1 << 24)})
        assert not wait([sent], 0.1).done
        assert len(receiver.receive()["spec"]) == 1 << 24
        sent.result()


class Wire:
    """Sits between sender and receiver, and can change what passes."""

    def __init__(self, where: tuple[str, int]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._where = where
        self.taken: list[bytes] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        self._near, _ = self._listener.accept()
        self._far = socket.create_connection(self._where)
        self._near.sendall(self._far.recv(32))
        self._far.sendall(self._near.recv(64))
        self._near.sendall(self._far.recv(32))

    def take(self) -> bytes:
        self._thread.join()
        """The next message: what was sent at once may come in parts."""
        length = read_exactly(self._near, 8)
        return length + read_exactly(self._near, 32 + int.from_bytes(length, "big") + 32)

    def pass_on(self, data: bytes) -> None:
        self._far.sendall(data)


@pytest.mark.parametrize("attack", ["replay", "change", "reorder", "none"])
def test_messages_cannot_be_replayed_or_changed(receiver: ControlReceiver, attack: str) -> None:
    wire = Wire(address(receiver))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(receiver.accept, 120)
        sender = ControlSender(wire.address, SECRET)
        sender.send({"n": 0})
        zero = wire.take()
        wire.pass_on(zero)
        first.result()
    sender.send({"n": 1})
    one = wire.take()
    sender.send({"n": 2})
    two = wire.take()
    wire.pass_on(
        {"replay": zero, "change": one.replace(b"1}", b"7}"), "reorder": two, "none": one}[attack]
    )
    if attack == "none":
        assert receiver.receive() == {"n": 1}
    else:
        with pytest.raises(ChannelError, match="signature"):
            receiver.receive()
