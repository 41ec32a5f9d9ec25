"""Message endpoints: ranks send and handle messages in a background thread while they train.

A message is a head (a few bytes of the caller's) and a body, such as a gradient. Sending never
blocks. Each rank handles the messages that arrive in a thread of its own, whatever its main thread
does. ``transport.py`` defines how messages travel, ``shutdown.py`` when an endpoint may close. An
endpoint that has failed, or whose process ends without closing it, has one second to notify the
other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.collectives.shutdown import ACK, FAILURE, FIN, LEAVE, ShutdownProtocol
from hvd_autosync.runtime.collectives.transport import Transport
from hvd_autosync.util.amounts import amount

#: Handles a message: source rank, head, body. Called in the service thread, for one message at a
#: time. The body stays valid as long as it is referenced.
MessageHandler = Callable[[int, bytes, memoryview], None]

_MESSAGE = b"L"
_EMPTY = memoryview(b"")
#: Flush timeout: how long a failed rank waits until the others know of the failure.
_FLUSH_TIMEOUT_S = 1.0
#: Longest wait of the service thread for messages.
_POLL_S = 0.25
#: How long abort() waits for the service thread, which may have to report a failure.
_ABORT_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class _Failure:
    message: str
    cause: BaseException | None
    at_s: float


class Endpoint:
    """The message endpoint of one rank: receives its messages and sends its own.

    Args:
        rank: This rank.
        size: The number of ranks.
        transport: Carries the messages. The endpoint owns it and ends it.
        on_message: Called with each message.
    """

    def __init__(
        self, rank: int, size: int, transport: Transport, on_message: MessageHandler
    ) -> None:
        self._rank = rank
        self._ranks = frozenset(range(size))
        self._transport = transport
        self._on_message = on_message
        self._outbox: deque[tuple[int, bytes, memoryview]] = deque()
        self._shutdown = ShutdownProtocol(self._ranks)
        self._sent_leave = False
        self._failure: _Failure | None = None
        self._reported = self._closing = False
        self._last_received_s = monotonic()
        self._connected = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, name="hvd_autosync endpoint", daemon=True
        )
        self._thread.start()
        atexit.register(self._abort_at_exit)
        _endpoints.add(self)

    def send(self, to: int, head: bytes, body: memoryview | None = None) -> None:
        """Send a message without blocking; any thread may call it, ``on_message`` too.

        Messages from one rank to another arrive in order, each exactly once. After a failure they
        are dropped.

        Args:
            to: The destination rank. A message to this rank itself passes through the service
                thread, without network.
            head: A few bytes.
            body: Plain, contiguous memory. It must not change before the message has arrived, which
                a reply can confirm.

        Raises:
            ValueError: There is no such rank, or ``body`` is not contiguous.
            AutosyncError: The endpoint is closed.
        """
        if to not in self._ranks:
            ranks = amount(len(self._ranks), "rank")
            raise ValueError(f"cannot send to rank {to}: the job has {ranks}")
        if not self._thread.is_alive():
            self.check()
            raise AutosyncError(
                f"cannot send to rank {to}: the endpoint is closed",
                hint="Call close() after the last send.",
            )
        octets = body.cast("B") if body is not None and body.nbytes else _EMPTY
        self._post(to, _MESSAGE + head, octets)

    def check(self) -> None:
        """Check that there is no failure; for threads that wait for a message.

        Raises:
            AutosyncError: A rank is gone, or ``on_message`` has failed on some rank.
        """
        if self._failure is not None:
            self._reported = True
            raise AutosyncError(
                self._failure.message, hint="See the last output of that rank."
            ) from self._failure.cause

    def close(self, patience_s: float = 60.0) -> None:
        """Close the endpoint once all messages to and from this rank are handled.

        All ranks call it. It is no collective of Horovod's: the endpoint goes on handling messages
        while ranks wait here for the others. A rank that is gone is not waited for.

        Args:
            patience_s: Longest wait without any arriving message.

        Raises:
            AutosyncError: As of :meth:`check`, if that has not raised it yet; or some rank does not
                close its endpoint.
        """
        if not self._closing:
            self._closing = True
            self._last_received_s = monotonic()
            for rank in self._ranks:
                self._post(rank, FIN)
            while self._thread.is_alive() and monotonic() - self._last_received_s < patience_s:
                self._thread.join(0.5)
            if self._thread.is_alive():
                missing = sorted(self._shutdown.awaited)
                self.abort(f"rank {self._rank} closes its message endpoint, ranks {missing} do not")
            atexit.unregister(self._abort_at_exit)
        if not self._reported:
            self.check()

    def close_in_background(self) -> None:
        """Call :meth:`close` in a thread that waits without limit, for callers that cannot wait."""

        def close() -> None:
            with contextlib.suppress(AutosyncError):  # no caller is left to tell
                self.close(math.inf)

        threading.Thread(target=close, name="hvd_autosync endpoint closes", daemon=True).start()

    def abort(self, why: str) -> None:
        """Close the endpoint within seconds, and notify the other ranks.

        Args:
            why: What :meth:`check` raises on all ranks, unless they know of an earlier failure.
        """
        self._closing = True
        self._post(self._rank, FAILURE + why.encode(errors="replace"))
        self._thread.join(_ABORT_TIMEOUT_S)
        if self._failure is None and self._thread.is_alive():  # on_message() does not return
            self._failure = _Failure(why, None, monotonic())
        atexit.unregister(self._abort_at_exit)

    def await_connections(self, most_s: float) -> None:
        """Wait until this rank can send to all others.

        Raises:
            AutosyncError: It cannot within ``most_s`` seconds, or there is a failure.
        """
        if not self._connected.wait(most_s):
            missing = sorted(self._transport.awaited)
            raise AutosyncError(f"rank {self._rank} cannot connect to ranks {missing}")
        self.check()

    def _post(self, to: int, text: bytes, body: memoryview = _EMPTY) -> None:
        self._outbox.append((to, text, body))
        self._transport.wake()

    def _serve(self) -> None:
        try:
            while not self._is_over():
                self._check_peers()
                for received in self._transport.receive(_POLL_S):
                    self._last_received_s = monotonic()
                    self._dispatch(*received)
                for to, text, body in [self._outbox.popleft() for _ in range(len(self._outbox))]:
                    if self._failure is not None and text[:1] in (_MESSAGE, FIN):
                        continue
                    if to == self._rank:
                        self._dispatch(to, text, body)
                    elif to not in self._transport.lost:
                        self._transport.send(to, text, body)
        except BaseException as error:
            self._fail(f"the message endpoint of rank {self._rank} failed: {error!r}", error)
            self._send_failures()
            raise
        finally:
            self._transport.end()

    def _send_failures(self) -> None:
        """Tell the other ranks, which would wait for this one, as far as that is possible."""
        assert self._failure is not None, "it has just failed"
        text = FAILURE + self._failure.message.encode(errors="replace")
        for to in self._ranks - {self._rank, *self._transport.lost}:
            with contextlib.suppress(Exception):  # the transport may be what has failed
                self._transport.send(to, text, _EMPTY)

    def _check_peers(self) -> None:
        if not self._transport.awaited:
            self._connected.set()
        for other, how in self._transport.lost.items():
            if not self._shutdown.is_acknowledged(other):
                self._fail(f"rank {other} is gone: {how}")
        if self._closing and not self._sent_leave and self._shutdown.may_leave():
            self._sent_leave = True
            for rank in self._ranks:
                self._post(rank, LEAVE)

    def _dispatch(self, source: int, text: bytes, body: memoryview) -> None:
        kind, head = text[:1], text[1:]
        if kind == _MESSAGE:
            self._handle(source, head, body)
            return
        if kind == FAILURE:
            self._fail(head.decode())
        else:
            self._shutdown.received(kind, source)
        if kind in (FAILURE, FIN):
            self._post(source, ACK)

    def _handle(self, source: int, head: bytes, body: memoryview) -> None:
        if self._failure is not None:
            return
        try:
            self._on_message(source, head, body)
        except BaseException as error:
            where = f"rank {self._rank} failed to handle a message from rank {source}"
            self._fail(f"{where}: {_describe(error)}", error)

    def _fail(self, message: str, cause: BaseException | None = None) -> None:
        """Stop handling messages, and notify all ranks; only the first failure counts."""
        if self._failure is None:
            self._failure = _Failure(message, cause, monotonic())
            self._connected.set()
            self._shutdown.failed()
            for other in self._ranks - {self._rank}:
                self._post(other, FAILURE + message.encode(errors="replace"))

    def _is_over(self) -> bool:
        if not self._closing:
            return False
        lost = self._transport.lost.keys()
        if self._failure is None:
            return self._sent_leave and self._shutdown.is_over(lost)
        timed_out = monotonic() > self._failure.at_s + _FLUSH_TIMEOUT_S
        return timed_out or self._shutdown.is_failure_known(self._rank, lost)

    def _abort_at_exit(self) -> None:
        """Abort because this process ends without having closed the endpoint."""
        error = getattr(sys, "last_value", None)
        after = (
            "without closing its message endpoint" if error is None else f"after {_describe(error)}"
        )
        self.abort(f"rank {self._rank} has ended {after}")

    def _forget(self) -> None:
        """Disable the endpoint in a forked child, which has no service thread."""
        atexit.unregister(self._abort_at_exit)
        self._closing = self._reported = True
        self._failure = _Failure("a forked process has no message endpoint", None, monotonic())
        self._transport.forget()


#: The endpoints of this process.
_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def abort_all(why: str) -> None:
    """Call :meth:`Endpoint.abort` on all open endpoints of this process, as before MPI ends."""
    for endpoint in list(_endpoints):
        endpoint.abort(why)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _forget_all() -> None:
    for endpoint in list(_endpoints):
        endpoint._forget()


os.register_at_fork(after_in_child=_forget_all)
