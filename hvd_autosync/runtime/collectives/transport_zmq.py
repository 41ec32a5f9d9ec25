"""Letters over ZeroMQ: what a job under Gloo has.

Each rank listens on one port of the job's network and connects to every other rank's, so that each
connection carries letters in one direction. They are encrypted and authenticated with CURVE
(ZeroMQ's RFC 26): each rank draws a pair of keys, whose public half Horovod's own connections tell
to the others. Who connects must prove to have the secret half of one of them (asked for as in
RFC 27), and this key says from which rank its letters are.

Each rank's first letter on a connection is empty: it tells here which connections are of ranks. Of
others a few are kept, and none for longer than a handshake may take.

A connection that breaks is never mended, for letters would be missing: its rank is lost. Queues
have no bounds, so nothing waits and nothing is dropped; what bounds them is that callers wait for
replies.
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

#: Where libzmq asks who may connect.
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"hvd_autosync"
#: A host that is cut off is noticed as by :func:`hvd_autosync.util.sockets.keep_alive`; while
#: something is on its way to it, after so many milliseconds.
_UNANSWERED_MS = 25_000
_LINGER_MS = 1000
#: How long a handshake may take, which on a busy machine is long; nobody waits longer for it.
_HANDSHAKE_MS = 60_000
#: Most connections of strangers; the oldest goes when it had some time to prove itself, at once
#: where this process has no descriptor left.
_STRANGERS, _ROOM_S = 64, 1.0
#: Most letters that are taken before others are sent.
_AT_ONCE = 64

_BEGINNINGS = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED
_BROKEN_OFF = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


def check_build() -> None:
    """Return if connections can be encrypted here.

    Raises:
        OSError: This libzmq has no CURVE.
    """
    zmq.curve_keypair()


class ZmqTransport:
    """The connections of one rank; made in one thread, and from :meth:`wake` on used in another.

    Args:
        address: The address to listen on.

    Attributes:
        card: What the other ranks must know to connect.
        awaited: Ranks to which there is no connection yet.
        lost: Ranks whose connection broke, and how.

    Raises:
        OSError: This libzmq has no CURVE, or nobody can listen on the address.
    """

    def __init__(self, address: str) -> None:
        self.awaited: set[int] = set()
        self.lost: dict[int, str] = {}
        self._context = zmq.Context()
        public, self._secret = zmq.curve_keypair()
        self._public = public
        self._gate = self._context.socket(zmq.REP)
        self._gate.bind(_ZAP_ENDPOINT)
        self._in = self._socket(zmq.DEALER)
        self._in.set(zmq.CURVE_SERVER, 1)
        self._in.set(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        self._in.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._in.bind(f"tcp://{address}:*")
        endpoint = self._in.get_string(zmq.LAST_ENDPOINT)
        self.card = json.dumps([endpoint, public.decode()])
        self._out = self._socket(zmq.ROUTER)
        self._out.set(zmq.ROUTER_MANDATORY, 1)
        #: Public key -> rank.
        self._known: dict[bytes, int] = {}
        #: Endpoint -> rank.
        self._rank_at: dict[str, int] = {}
        #: Descriptors of connections, each with its inode: a number alone may be another file's.
        self._connections: dict[int, int] = {}
        #: Those of strangers -> since when, in the order of their arrival.
        self._strangers: dict[int, float] = {}
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell)
        self._arrivals = self._in.get_monitor_socket(
            _BEGINNINGS | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPT_FAILED
        )
        self._departures = self._out.get_monitor_socket(
            _BEGINNINGS | zmq.EVENT_HANDSHAKE_SUCCEEDED | _BROKEN_OFF | _REFUSALS | _ENDS
        )
        self._poller = zmq.Poller()
        for each in (self._bell, self._gate, self._in, self._arrivals, self._departures):
            self._poller.register(each, zmq.POLLIN)

    def connect(self, own: int, cards: Sequence[str]) -> None:
        """Begin to connect to all others, and let them in.

        Args:
            own: This rank, to which nobody connects.
            cards: Of all ranks, in their order.
        """
        for rank, card in enumerate(cards):
            if rank == own:
                continue
            endpoint, key = json.loads(card)
            self._known[z85.decode(key)] = rank
            self._rank_at[endpoint] = rank
            self.awaited.add(rank)
            self._out.set(zmq.CURVE_SERVERKEY, key.encode())
            self._out.set(zmq.CONNECT_ROUTING_ID, b"%d" % rank)
            self._out.connect(endpoint)
            self.send(rank, b"", memoryview(b""))

    def send(self, to: int, text: bytes, body: memoryview) -> None:
        """Queue a letter; the memory of a large body is read when it is its turn."""
        try:
            self._out.send_multipart([b"%d" % to, text, body], flags=zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # of a rank that we shall hear to be gone
                raise

    def receive(self, most_s: float) -> list[TransportMessage]:
        """What arrived."""
        ready = dict(self._poller.poll(int(most_s * 1000)))
        if self._bell in ready:
            os.eventfd_read(self._bell)
        if self._gate in ready:
            self._admit()
        if self._departures in ready:
            self._note(*_event(self._departures))
        messages, ranks = self._messages() if self._in in ready else ([], [])
        # Whoever has sent a letter had arrived before.
        while self._arrivals.poll(0):
            self._arrived(*_event(self._arrivals)[:2])
        for number in ranks:
            self._strangers.pop(number, None)
        self._make_room()
        return messages

    def wake(self) -> None:
        """Let :meth:`receive` return."""
        os.eventfd_write(self._bell, 1)

    def end(self) -> None:
        """Close all connections; what is queued has a second to get out."""
        for each in (self._in, self._out):
            each.disable_monitor()
        self._context.destroy(linger=_LINGER_MS)
        self._connections.clear()

    def forget(self) -> None:
        """Close the connections here: the other ranks must see when the parent ends."""
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
            (zmq.TCP_MAXRT, _UNANSWERED_MS),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.CURVE_PUBLICKEY, self._public),
            (zmq.CURVE_SECRETKEY, self._secret),
        ):
            made.set(option, value)
        return made

    def _messages(self) -> tuple[list[TransportMessage], list[int]]:
        """Letters that are here, and the descriptors of connections on which the first one came."""
        messages: list[TransportMessage] = []
        ranks: list[int] = []
        with contextlib.suppress(zmq.Again):
            while len(messages) < _AT_ONCE:
                frames = self._in.recv_multipart(zmq.NOBLOCK, copy=False)
                text, body = frames
                if text.bytes:
                    messages.append((int(text.get("User-Id")), text.bytes, body.buffer))
                else:
                    ranks.append(int(text.get("__fd")))
        return messages, ranks

    def _admit(self) -> None:
        """Answer libzmq whether somebody who has proved to have a key may come in."""
        version, request, _, _, _, mechanism, *credentials = self._gate.recv_multipart()
        rank = self._known.get(credentials[0]) if mechanism == b"CURVE" else None
        verdict = [b"400", b"unknown", b""] if rank is None else [b"200", b"", b"%d" % rank]
        self._gate.send_multipart([version, request, *verdict, b""])

    def _arrived(self, kind: int, number: int) -> None:
        """Something happened at the port."""
        if kind & _BEGINNINGS:
            self._keep(number)
            self._strangers[number] = monotonic()
        elif kind == zmq.EVENT_DISCONNECTED:
            self._connections.pop(number, None)
            self._strangers.pop(number, None)
        elif self._strangers:  # no descriptor was left to accept another with
            self._hang_up(next(iter(self._strangers)))

    def _make_room(self) -> None:
        """Hang up on the strangers that are too many."""
        for number, since in list(self._strangers.items()):
            if len(self._strangers) <= _STRANGERS or monotonic() - since < _ROOM_S:
                return
            self._hang_up(number)

    def _hang_up(self, number: int) -> None:
        """Have libzmq see a stranger's connection end."""
        del self._strangers[number]
        with contextlib.suppress(OSError):  # it has ended
            if os.fstat(number).st_ino == self._connections.get(number):
                connection = socket.socket(fileno=number)
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                finally:
                    connection.detach()

    def _keep(self, number: int) -> None:
        with contextlib.suppress(OSError):  # of one that is gone already
            self._connections[number] = os.fstat(number).st_ino

    def _note(self, kind: int, number: int, endpoint: str) -> None:
        """Something happened to a connection to another rank."""
        if kind & _BEGINNINGS:
            self._keep(number)
            return
        rank = self._rank_at[endpoint]
        if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.awaited.discard(rank)
        elif kind & _REFUSALS:
            self.lost.setdefault(rank, f"it refuses this rank's key (ZeroMQ says {number:#x})")
        elif kind & _BROKEN_OFF:
            self.lost.setdefault(rank, f"the handshake broke off ({os.strerror(number)})")
        elif rank in self.awaited:
            self.lost.setdefault(rank, "there is no way to its address")
        else:
            self.lost.setdefault(rank, "its connection broke")


def _event(monitor: zmq.Socket[bytes]) -> tuple[int, int, str]:
    """The next event of a monitor: its kind, its number, and the endpoint."""
    event = recv_monitor_message(monitor)
    return event["event"], int(event["value"]), event["endpoint"].decode()
