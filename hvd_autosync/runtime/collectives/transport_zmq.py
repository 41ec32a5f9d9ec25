"""Transport over ZeroMQ, for jobs under Gloo.

Each rank listens on one port of the job's network and connects to that of every other rank, so each
connection carries messages in one direction. They are encrypted and authenticated with CURVE
(ZeroMQ's RFC 26): each rank generates a key pair, and Horovod's own connections distribute the
public keys. A client must prove that it has the secret key of one of them (authentication handler,
RFC 27), and the key determines the rank of its messages.

Each rank's first message on a connection is empty: it marks the connection as one of a rank. A few
unauthenticated connections are kept, and none for longer than a handshake may take.

A connection that breaks is never re-established, because messages would be missing: its rank is
lost. Queues have no bounds, so nothing blocks and nothing is dropped; they stay short because
callers wait for replies.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import weakref
from collections.abc import Sequence
from time import monotonic

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from hvd_autosync.runtime.collectives.transport import TransportMessage

#: Where libzmq asks the authentication handler who may connect.
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"hvd_autosync"
#: A host that is cut off is detected as by :func:`hvd_autosync.util.sockets.keep_alive`; while data
#: for it is unacknowledged, after this many milliseconds.
_TCP_TIMEOUT_MS = 25_000
_FLUSH_TIMEOUT_MS = 1000
#: Longest handshake, which takes long on a busy machine; nothing else waits for it.
_HANDSHAKE_MS = 60_000
#: Most unauthenticated connections. The oldest is closed after this grace period in seconds, or at
#: once where this process has no descriptor left.
_MAX_UNAUTHENTICATED, _GRACE_S = 64, 1.0
#: Most messages received before queued ones are sent.
_MAX_BATCH = 64

_OPENED = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED
_HANDSHAKE_BROKEN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_CLOSED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


def check_build() -> None:
    """Check that this libzmq can encrypt connections.

    Raises:
        zmq.ZMQError: This libzmq has no CURVE.
    """
    zmq.curve_keypair()


class ZmqTransport:
    """The connections of one rank.

    One thread creates it; from the first :meth:`receive` on another uses it.

    Args:
        address: The address to listen on.

    Attributes:
        endpoint_info: What the other ranks need to connect: endpoint and public key, as JSON.
        awaited: Ranks to which there is no connection yet.
        lost: Ranks whose connection broke, each with the reason.

    Raises:
        OSError: This libzmq has no CURVE, or the address cannot be listened on.
    """

    def __init__(self, address: str) -> None:
        self.awaited: set[int] = set()
        self.lost: dict[int, str] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        public, self._secret = zmq.curve_keypair()
        self._public = public
        self._auth_handler = self._context.socket(zmq.REP)
        self._auth_handler.bind(_ZAP_ENDPOINT)
        self._in = self._socket(zmq.DEALER)
        self._in.set(zmq.CURVE_SERVER, 1)
        self._in.set(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        self._in.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._in.bind(f"tcp://{address}:*")
        endpoint = self._in.get_string(zmq.LAST_ENDPOINT)
        self.endpoint_info = json.dumps([endpoint, public.decode()])
        self._out = self._socket(zmq.ROUTER)
        self._out.set(zmq.ROUTER_MANDATORY, 1)
        #: Public key -> rank.
        self._rank_of_key: dict[bytes, int] = {}
        #: Endpoint -> rank.
        self._rank_at: dict[str, int] = {}
        #: Descriptor of each connection -> its inode: the number alone may since be another file's.
        self._connections: dict[int, int] = {}
        #: Descriptor of each unauthenticated connection -> when it arrived, oldest first.
        self._unauthenticated: dict[int, float] = {}
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wakeup)
        self._incoming_events = self._in.get_monitor_socket(
            _OPENED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPT_FAILED
        )
        self._outgoing_events = self._out.get_monitor_socket(
            _OPENED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _HANDSHAKE_BROKEN | _REFUSED | _CLOSED
        )
        self._poller = zmq.Poller()
        for each in (
            self._wakeup,
            self._auth_handler,
            self._in,
            self._incoming_events,
            self._outgoing_events,
        ):
            self._poller.register(each, zmq.POLLIN)

    def connect(self, own: int, endpoint_infos: Sequence[str]) -> None:
        """Begin to connect to all other ranks, and accept their connections.

        Args:
            own: This rank, which does not connect to itself.
            endpoint_infos: ``endpoint_info`` of all ranks, in order of rank.
        """
        for rank, endpoint_info in enumerate(endpoint_infos):
            if rank == own:
                continue
            endpoint, key = json.loads(endpoint_info)
            self._rank_of_key[z85.decode(key)] = rank
            self._rank_at[endpoint] = rank
            self.awaited.add(rank)
            self._out.set(zmq.CURVE_SERVERKEY, key.encode())
            self._out.set(zmq.CONNECT_ROUTING_ID, b"%d" % rank)
            self._out.connect(endpoint)
            self.send(rank, b"", memoryview(b""))

    def send(self, to: int, text: bytes, body: memoryview) -> None:
        """Queue a message; the memory of a large body is read when it is sent."""
        try:
            self._out.send_multipart([b"%d" % to, text, body], flags=zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # of a rank that is about to be reported lost
                raise

    def receive(self, most_s: float) -> list[TransportMessage]:
        """Return what arrived."""
        ready = dict(self._poller.poll(int(most_s * 1000)))
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        if self._auth_handler in ready:
            self._authenticate()
        if self._outgoing_events in ready:
            self._on_outgoing(*_event(self._outgoing_events))
        messages, ranks = self._messages() if self._in in ready else ([], [])
        # A connection that has sent a message has an earlier arrival event.
        while self._incoming_events.poll(0):
            self._on_incoming(*_event(self._incoming_events)[:2])
        for number in ranks:
            self._unauthenticated.pop(number, None)
        self._drop_unauthenticated()
        return messages

    def wake(self) -> None:
        """Let :meth:`receive` return."""
        os.eventfd_write(self._wakeup, 1)

    def end(self) -> None:
        """Close all connections, after at most a second for what is queued."""
        for each in (self._in, self._out):
            each.disable_monitor()
        self._context.destroy(_FLUSH_TIMEOUT_MS)
        self._connections.clear()

    def forget(self) -> None:
        """Close the connections in this process, so that other ranks see when the parent ends."""
        for number, inode in self._connections.items():
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino == inode:
                    os.close(number)
        self._connections.clear()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.RECONNECT_IVL, -1),
            (zmq.BACKLOG, 4096),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 10),
            (zmq.TCP_KEEPALIVE_INTVL, 5),
            (zmq.TCP_KEEPALIVE_CNT, 3),
            (zmq.TCP_MAXRT, _TCP_TIMEOUT_MS),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.CURVE_PUBLICKEY, self._public),
            (zmq.CURVE_SECRETKEY, self._secret),
        ):
            made.set(option, value)
        return made

    def _messages(self) -> tuple[list[TransportMessage], list[int]]:
        """Return what has arrived, and descriptors of connections that sent their first message."""
        messages: list[TransportMessage] = []
        ranks: list[int] = []
        with contextlib.suppress(zmq.Again):
            while len(messages) < _MAX_BATCH:
                frames = self._in.recv_multipart(zmq.NOBLOCK, copy=False)
                text, body = frames
                if text.bytes:
                    messages.append((int(text.get("User-Id")), text.bytes, body.buffer))
                else:
                    ranks.append(int(text.get("__fd")))
        return messages, ranks

    def _authenticate(self) -> None:
        """Authentication handler: tell libzmq whether the key of a client is that of a rank."""
        version, request, _, _, _, mechanism, *credentials = self._auth_handler.recv_multipart()
        rank = self._rank_of_key.get(credentials[0]) if mechanism == b"CURVE" else None
        reply = [b"400", b"unknown", b""] if rank is None else [b"200", b"", b"%d" % rank]
        self._auth_handler.send_multipart([version, request, *reply, b""])

    def _on_incoming(self, kind: int, number: int) -> None:
        """Handle an event of an incoming connection."""
        if kind & _OPENED:
            self._remember_fd(number)
            self._unauthenticated[number] = monotonic()
        elif kind == zmq.EVENT_DISCONNECTED:
            self._connections.pop(number, None)
            self._unauthenticated.pop(number, None)
        elif self._unauthenticated:  # no descriptor was left to accept a connection
            self._disconnect(next(iter(self._unauthenticated)))

    def _drop_unauthenticated(self) -> None:
        """Close the oldest unauthenticated connections if there are too many."""
        for number, since in list(self._unauthenticated.items()):
            if len(self._unauthenticated) <= _MAX_UNAUTHENTICATED or monotonic() - since < _GRACE_S:
                return
            self._disconnect(number)

    def _disconnect(self, number: int) -> None:
        """Shut an unauthenticated connection down, so that libzmq sees its end."""
        del self._unauthenticated[number]
        with contextlib.suppress(OSError):  # it has ended
            if os.fstat(number).st_ino == self._connections.get(number):
                connection = socket.socket(fileno=number)
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                finally:
                    connection.detach()

    def _remember_fd(self, number: int) -> None:
        with contextlib.suppress(OSError):  # of one that is gone already
            self._connections[number] = os.fstat(number).st_ino

    def _on_outgoing(self, kind: int, number: int, endpoint: str) -> None:
        """Handle an event of an outgoing connection."""
        if kind & _OPENED:
            self._remember_fd(number)
            return
        rank = self._rank_at[endpoint]
        if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.awaited.discard(rank)
        elif kind & _REFUSED:
            self.lost.setdefault(rank, f"it rejects this rank's key (ZeroMQ error {number:#x})")
        elif kind & _HANDSHAKE_BROKEN:
            self.lost.setdefault(rank, f"the handshake failed ({os.strerror(number)})")
        elif rank in self.awaited:
            self.lost.setdefault(rank, "its address cannot be reached")
        else:
            self.lost.setdefault(rank, "its connection broke")


def _event(monitor: zmq.Socket[bytes]) -> tuple[int, int, str]:
    """Return the next event of a monitor: its kind, its value, and the endpoint."""
    event = recv_monitor_message(monitor)
    return event["event"], int(event["value"]), event["endpoint"].decode()
