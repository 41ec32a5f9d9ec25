"""Letters between ranks, which a thread sends and heeds while the rank trains.

A letter is a head, a few bytes of the caller's, and a body, such as a gradient. Whoever sends it
waits for nobody; whoever gets it heeds it in a thread of its own, whatever its rank does meanwhile.
How letters travel is a carrier's business (``carrier.py``); when a mailbox may end, ``farewell.py``
says. One that has failed, or whose rank ends without closing it, has a second to tell the others.
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
from hvd_autosync.runtime.collectives.shutdown import (
    FAILURE,
    GOODBYE,
    LEAVE,
    THANKS,
    ShutdownProtocol,
)
from hvd_autosync.runtime.collectives.transport import Transport

#: What is done with a letter: source rank, head, body. Called in the service thread, one letter
#: after the other. The body is valid as long as somebody holds it.
MessageHandler = Callable[[int, bytes, memoryview], None]

_LETTER = b"L"
_EMPTY = memoryview(b"")
#: Longest wait of a rank that has failed for the others to know.
_LAST_WORDS_S = 1.0
#: Longest sleep of the service thread.
_NAP_S = 0.25
#: Longest wait for its end, where it may have to tell of a failure.
_ENDING_S = 3.0


@dataclass(frozen=True)
class _Failure:
    message: str
    cause: BaseException | None
    at_s: float


class Endpoint:
    """Where letters to this rank arrive, and from where it sends its own.

    Args:
        rank: This rank.
        size: The number of ranks.
        carrier: Carries letters from now on; the mailbox ends it.
        heed: Called with each letter.
    """

    def __init__(
        self, rank: int, size: int, carrier: Transport, on_message: MessageHandler
    ) -> None:
        self._rank = rank
        self._ranks = frozenset(range(size))
        self._carrier = carrier
        self._on_message = on_message
        self._outbox: deque[tuple[int, bytes, memoryview]] = deque()
        self._farewell = ShutdownProtocol(self._ranks)
        self._takes_leave = False
        self._failure: _Failure | None = None
        self._told = self._leaving = False
        self._heard_at_s = monotonic()
        self._connected = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hvd_autosync mail", daemon=True)
        self._thread.start()
        atexit.register(self._leave)
        _mailboxes.add(self)

    def send(self, to: int, head: bytes, body: memoryview | None = None) -> None:
        """Send a letter; from any thread, also from within ``on_message``; returns at once.

        Letters from one rank to another arrive in order, each of them once. After a failure they
        are dropped.

        Args:
            to: The rank; this rank's own letters come from the same thread, without network.
            head: A few bytes.
            body: Plain, contiguous memory. It must not change until the letter has arrived, which
                a reply can tell.

        Raises:
            ValueError: There is no such rank, or ``body`` is not contiguous.
            AutosyncError: The mailbox has ended.
        """
        if to not in self._ranks:
            raise ValueError(f"a letter to rank {to} of {len(self._ranks)}")
        if not self._thread.is_alive():
            self.check()
            raise AutosyncError(f"a letter to rank {to} after close()", hint="Close it later.")
        octets = body.cast("B") if body is not None and body.nbytes else _EMPTY
        self._post(to, _LETTER + head, octets)

    def check(self) -> None:
        """Return if all is well; for threads that wait for a letter.

        Raises:
            AutosyncError: A rank is gone, or ``on_message`` has failed on some rank.
        """
        if self._failure is not None:
            self._told = True
            raise AutosyncError(
                self._failure.message, hint="See what that rank wrote last."
            ) from self._failure.cause

    def close(self, patience_s: float = 60.0) -> None:
        """End, when all letters to and from this rank have been heeded; all ranks call it.

        No collective of Horovod's: letters are heeded on while ranks wait here for others to close.
        A rank that is gone is not waited for.

        Args:
            patience_s: Longest wait in which no letter comes.

        Raises:
            AutosyncError: As :meth:`check`, if that has not raised it yet; or some rank does not
                close its mailbox.
        """
        if not self._leaving:
            self._leaving = True
            self._heard_at_s = monotonic()
            for rank in self._ranks:
                self._post(rank, GOODBYE)
            while self._thread.is_alive() and monotonic() - self._heard_at_s < patience_s:
                self._thread.join(0.5)
            if self._thread.is_alive():
                late = sorted(self._farewell.awaited)
                self.abandon(f"rank {self._rank} closes its mailbox, ranks {late} do not")
            atexit.unregister(self._leave)
        if not self._told:
            self.check()

    def retire(self) -> None:
        """:meth:`close` whenever all other ranks do, in a thread: for those who cannot wait."""

        def close() -> None:
            with contextlib.suppress(AutosyncError):  # nobody asks any more
                self.close(math.inf)

        threading.Thread(target=close, name="hvd_autosync mail retires", daemon=True).start()

    def abandon(self, why: str) -> None:
        """End within seconds, and have the other ranks know.

        Args:
            why: What :meth:`check` tells on all ranks, unless they know of an earlier failure.
        """
        self._leaving = True
        self._post(self._rank, FAILURE + why.encode(errors="replace"))
        self._thread.join(_ENDING_S)
        if self._failure is None and self._thread.is_alive():  # heed does not return
            self._failure = _Failure(why, None, monotonic())
        atexit.unregister(self._leave)

    def await_connections(self, most_s: float) -> None:
        """Wait until this rank can send to all others.

        Raises:
            AutosyncError: It cannot.
        """
        if not self._connected.wait(most_s):
            late = sorted(self._carrier.awaited)
            raise AutosyncError(f"rank {self._rank} does not reach ranks {late}")
        self.check()

    def _post(self, to: int, text: bytes, body: memoryview = _EMPTY) -> None:
        self._outbox.append((to, text, body))
        self._carrier.wake()

    def _serve(self) -> None:
        try:
            while not self._is_over():
                self._look_around()
                for parcel in self._carrier.receive(_NAP_S):
                    self._heard_at_s = monotonic()
                    self._take(*parcel)
                for to, text, body in [self._outbox.popleft() for _ in range(len(self._outbox))]:
                    if self._failure is not None and text[:1] in (_LETTER, GOODBYE):
                        continue
                    if to == self._rank:
                        self._take(to, text, body)
                    elif to not in self._carrier.lost:
                        self._carrier.send(to, text, body)
        except BaseException as error:
            self._fail(f"the mailbox of rank {self._rank} broke: {error!r}", error)
            raise
        finally:
            self._carrier.end()

    def _look_around(self) -> None:
        if not self._carrier.awaited:
            self._connected.set()
        for other, how in self._carrier.lost.items():
            if not self._farewell.has_parted(other):
                self._fail(f"rank {other} is gone: {how}")
        if self._leaving and not self._takes_leave and self._farewell.may_leave():
            self._takes_leave = True
            for rank in self._ranks:
                self._post(rank, LEAVE)

    def _take(self, source: int, text: bytes, body: memoryview) -> None:
        kind, head = text[:1], text[1:]
        if kind == _LETTER:
            self._hand_over(source, head, body)
            return
        if kind == FAILURE:
            self._fail(head.decode())
        else:
            self._farewell.heard(kind, source)
        if kind in (FAILURE, GOODBYE):
            self._post(source, THANKS)

    def _hand_over(self, source: int, head: bytes, body: memoryview) -> None:
        if self._failure is not None:
            return
        try:
            self._on_message(source, head, body)
        except BaseException as error:
            where = f"rank {self._rank} failed on a letter of rank {source}"
            self._fail(f"{where}: {_described(error)}", error)

    def _fail(self, message: str, cause: BaseException | None = None) -> None:
        """Stop heeding, and tell everyone; only the first failure counts."""
        if self._failure is None:
            self._failure = _Failure(message, cause, monotonic())
            self._connected.set()
            self._farewell.failed()
            for other in self._ranks - {self._rank}:
                self._post(other, FAILURE + message.encode(errors="replace"))

    def _is_over(self) -> bool:
        if not self._leaving:
            return False
        lost = self._carrier.lost.keys()
        if self._failure is None:
            return self._takes_leave and self._farewell.is_over(lost)
        late = monotonic() > self._failure.at_s + _LAST_WORDS_S
        return late or self._farewell.is_known(self._rank, lost)

    def _leave(self) -> None:
        """This process ends, and nobody has closed the mailbox."""
        error = getattr(sys, "last_value", None)
        after = "without closing its mailbox" if error is None else f"after {_described(error)}"
        self.abandon(f"rank {self._rank} has ended {after}")

    def _forget(self) -> None:
        """In a forked child, which has neither the thread nor any business with the letters."""
        atexit.unregister(self._leave)
        self._leaving = self._told = True
        self._failure = _Failure("a forked process has no mailbox", None, monotonic())
        self._carrier.forget()


#: Those of this process.
_mailboxes: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def abandon_all(why: str) -> None:
    """:meth:`Endpoint.abandon` those of this process that are open, as before MPI ends."""
    for endpoint in list(_mailboxes):
        endpoint.abandon(why)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _forget_all() -> None:
    for endpoint in list(_mailboxes):
        endpoint._forget()


os.register_at_fork(after_in_child=_forget_all)
