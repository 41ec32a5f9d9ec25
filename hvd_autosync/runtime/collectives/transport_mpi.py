"""Transport over MPI, with mpi4py, for jobs under MPI.

It uses two-sided messages on a communicator of its own, which the service thread polls: in Open MPI
a blocking probe keeps a processor busy, and one-sided windows make no progress while their owner
computes. A message becomes one MPI message with kind, head and size of the body, and a second one
with the body, if there is one. The receiver posts bodies in the order of their announcements, which
is the order in which MPI matches them. Bodies of 2 GiB and more are not supported.

If a rank dies, ``mpirun`` ends the job.
"""

from __future__ import annotations

import struct
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_autosync.errors import HorovodBuildError
from hvd_autosync.runtime.collectives.transport import TransportMessage

if TYPE_CHECKING:
    from mpi4py import MPI

_TEXT, _BODY = 1, 2
#: Precedes each text: size of the body.
_SIZE = struct.Struct("!Q")
#: Pause between two polls: this share of the time since the last message, so that a wait takes a
#: tenth longer and a rank without messages hardly uses its processor; and its bounds, seconds.
_BACKOFF, _MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 50e-6, 5e-3
#: Pause between two polls while MPI has an operation in progress, which may advance in polls only.
_PROGRESS_PAUSE_S = 200e-6
_FLUSH_TIMEOUT_S = 1.0


@dataclass
class _Incoming:
    text: bytes
    body: memoryview
    request: MPI.Request | None


class MpiTransport:
    """Messages of one rank; creating it is a collective.

    Args:
        world_ranks: For each Horovod rank, its rank in ``MPI.COMM_WORLD``.

    Attributes:
        awaited: Always empty: MPI connects.
        lost: Always empty: MPI ends the job.
    """

    def __init__(self, world_ranks: Sequence[int]) -> None:
        mpi = _initialized()
        group = mpi.COMM_WORLD.Get_group().Incl(world_ranks)
        self._mpi = mpi
        self._communicator = mpi.COMM_WORLD.Create_group(group)
        self.awaited: frozenset[int] = frozenset()
        self.lost: Mapping[int, str] = {}
        #: Sends in progress, with their memory.
        self._sending: list[tuple[MPI.Request, object]] = []
        #: For each rank, announced messages that were not delivered yet.
        self._receiving: list[deque[_Incoming]] = [deque() for _ in world_ranks]
        self._wakeup = threading.Event()
        self._last_received_s = perf_counter()

    def send(self, to: int, text: bytes, body: memoryview) -> None:
        """Begin to send a message."""
        announcement = _SIZE.pack(len(body)) + text
        for tag, content in ((_TEXT, announcement), (_BODY, body)):
            if len(content):
                message: Any = [content, self._mpi.BYTE]
                self._sending.append((self._communicator.Isend(message, to, tag), content))

    def receive(self, most_s: float) -> list[TransportMessage]:
        """Return what arrived."""
        until_s = perf_counter() + most_s
        while True:
            self._take_announcements()
            messages = self._take_complete()
            self._sending = [each for each in self._sending if not each[0].Test()]
            now_s = perf_counter()
            if messages:
                self._last_received_s = now_s
                return messages
            pause_s = min(
                max(_BACKOFF * (now_s - self._last_received_s), _MIN_PAUSE_S), _MAX_PAUSE_S
            )
            if self._sending or any(self._receiving):
                pause_s = min(pause_s, _PROGRESS_PAUSE_S)
            if now_s > until_s or self._wakeup.wait(pause_s):
                self._wakeup.clear()
                return []

    def wake(self) -> None:
        """Let :meth:`receive` return."""
        self._wakeup.set()

    def end(self) -> None:
        """Wait up to the flush timeout for sends in progress."""
        until_s = perf_counter() + _FLUSH_TIMEOUT_S
        while self._sending and perf_counter() < until_s:
            self._sending = [each for each in self._sending if not each[0].Test()]
            sleep(_MIN_PAUSE_S)
        if not self._sending and not any(self._receiving):
            self._communicator.Free()

    def forget(self) -> None:
        """Do nothing: a forked child cannot use MPI."""

    def _take_announcements(self) -> None:
        """Receive announcements, and post receives for the bodies."""
        status = self._mpi.Status()
        while True:
            found = self._communicator.Improbe(self._mpi.ANY_SOURCE, _TEXT, status)
            if found is None:
                return
            announcement = bytearray(status.Get_count(self._mpi.BYTE))
            found.Recv([announcement, self._mpi.BYTE])
            (size,) = _SIZE.unpack_from(announcement)
            source, body = status.Get_source(), np.empty(size, np.uint8).data
            request = None
            if size:
                request = self._communicator.Irecv([body, self._mpi.BYTE], source, _BODY)
            text = bytes(announcement[_SIZE.size :])
            self._receiving[source].append(_Incoming(text, body, request))

    def _take_complete(self) -> list[TransportMessage]:
        """Return the messages that are complete, those of one rank in order."""
        messages = []
        for source, queue in enumerate(self._receiving):
            while queue and (queue[0].request is None or queue[0].request.Test()):
                message = queue.popleft()
                messages.append((source, message.text, message.body))
        return messages


def own_world_rank() -> int:
    """Return this process's rank in ``MPI.COMM_WORLD``.

    Raises:
        HorovodBuildError: MPI cannot be used here.
    """
    return int(_initialized().COMM_WORLD.Get_rank())


def _initialized() -> Any:
    # mpi4py crashes if it is imported after hvd.init().
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        raise HorovodBuildError(
            "mpi4py.MPI was not imported before hvd.init()",
            hint="Install hvd-autosync[mpi], and write `import mpi4py.MPI` above hvd.init().",
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise HorovodBuildError(
            "MPI was initialized without MPI_THREAD_MULTIPLE",
            hint="Leave mpi4py.rc.threads and mpi4py.rc.thread_level as they are, and use an MPI "
            "that is built with threads.",
        )
    return mpi
