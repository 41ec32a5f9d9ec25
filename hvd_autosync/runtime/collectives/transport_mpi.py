"""Letters over MPI, with mpi4py: what a job under MPI has.

Two-sided messages on a communicator of their own, polled for by the service thread: a blocking
probe keeps a processor busy in Open MPI, and one-sided windows make no progress there while their
owner computes. A letter is one message with its kind, its head and the size of its body, and one
with the body, if it has any; the receiver posts bodies in the order of their announcements, which
is the order in which MPI matches them. Bodies of 2 GiB and more are not provided for.

A rank that dies is the business of ``mpirun``, which then ends the job.
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
#: In front of each text: size of the body.
_SIZE = struct.Struct("!Q")
#: Between two polls this share of the time since the last letter passes, so that what takes long
#: takes a tenth longer, and a rank that gets no letters hardly computes; and bounds of it, seconds.
_SHARE, _SHORTEST_S, _LONGEST_S = 0.1, 50e-6, 5e-3
#: Between two polls while MPI has something under way, which it may move in polls only.
_MOVING_S = 200e-6
_LINGER_S = 1.0


@dataclass
class _Arriving:
    text: bytes
    body: memoryview
    request: MPI.Request | None


class MpiTransport:
    """Messages of one rank; a collective when it is made.

    Args:
        world_ranks: Of each rank of Horovod's, that in ``MPI.COMM_WORLD``.

    Attributes:
        awaited: Nobody: MPI connects.
        lost: Nobody: MPI ends the job.
    """

    def __init__(self, world_ranks: Sequence[int]) -> None:
        mpi = _initialized()
        group = mpi.COMM_WORLD.Get_group().Incl(world_ranks)
        self._mpi = mpi
        self._communicator = mpi.COMM_WORLD.Create_group(group)
        self.awaited: frozenset[int] = frozenset()
        self.lost: Mapping[int, str] = {}
        #: What MPI has not sent yet, with its memory.
        self._leaving: list[tuple[MPI.Request, object]] = []
        #: Of each rank what has been announced and not been handed over.
        self._arriving: list[deque[_Arriving]] = [deque() for _ in world_ranks]
        self._bell = threading.Event()
        self._last_s = perf_counter()

    def send(self, to: int, text: bytes, body: memoryview) -> None:
        """Begin to send a letter."""
        announcement = _SIZE.pack(len(body)) + text
        for tag, content in ((_TEXT, announcement), (_BODY, body)):
            if len(content):
                message: Any = [content, self._mpi.BYTE]
                self._leaving.append((self._communicator.Isend(message, to, tag), content))

    def receive(self, most_s: float) -> list[TransportMessage]:
        """What arrived."""
        until_s = perf_counter() + most_s
        while True:
            self._announced()
            messages = self._arrived()
            self._leaving = [each for each in self._leaving if not each[0].Test()]
            now_s = perf_counter()
            if messages:
                self._last_s = now_s
                return messages
            pause_s = min(max(_SHARE * (now_s - self._last_s), _SHORTEST_S), _LONGEST_S)
            if self._leaving or any(self._arriving):
                pause_s = min(pause_s, _MOVING_S)
            if now_s > until_s or self._bell.wait(pause_s):
                self._bell.clear()
                return []

    def wake(self) -> None:
        """Let :meth:`receive` return."""
        self._bell.set()

    def end(self) -> None:
        """Let what is under way get out."""
        until_s = perf_counter() + _LINGER_S
        while self._leaving and perf_counter() < until_s:
            self._leaving = [each for each in self._leaving if not each[0].Test()]
            sleep(_SHORTEST_S)
        if not self._leaving and not any(self._arriving):
            self._communicator.Free()

    def forget(self) -> None:
        """Nothing to do: a forked child cannot use MPI."""

    def _announced(self) -> None:
        """Take announcements, and provide memory for the bodies."""
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
            self._arriving[source].append(_Arriving(text, body, request))

    def _arrived(self) -> list[TransportMessage]:
        """The letters that are complete, those of one rank in order."""
        messages = []
        for source, queue in enumerate(self._arriving):
            while queue and (queue[0].request is None or queue[0].request.Test()):
                letter = queue.popleft()
                messages.append((source, letter.text, letter.body))
        return messages


def own_world_rank() -> int:
    """This process's rank in ``MPI.COMM_WORLD``.

    Raises:
        HorovodBuildError: MPI cannot be used here.
    """
    return int(_initialized().COMM_WORLD.Get_rank())


def _initialized() -> Any:
    # Imported after hvd.init() it would crash.
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
