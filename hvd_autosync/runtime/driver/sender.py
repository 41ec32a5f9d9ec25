"""Sends messages to the driver through the process's original standard error.

:mod:`hvd_autosync.runtime.driver.wire` defines the messages. If nothing reads them any more, the
launcher or the driver has died, perhaps on another host: the process then ends itself, so that it
does not stay behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hvd_autosync.runtime.driver.processes import exit_with_children
from hvd_autosync.runtime.driver.wire import Message, write_message

_INTERVAL_S = 1.0
#: Exit status of a rank whose messages are not read (EX_UNAVAILABLE of sysexits.h).
_UNREAD_STATUS = 69


class Sender:
    """Sends messages of one rank, each as a whole, in the order of the calls.

    All methods are thread-safe.

    Args:
        fd: Descriptor to write to; a duplicate of the process's standard error.
        key: The trial's key.
        rank: Rank of this process, if it is known yet.
    """

    def __init__(self, fd: int, key: str, rank: int = 0) -> None:
        self._fd = fd
        self._key = key
        self._rank = rank
        self._number = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def start(self, rank: int, news: Callable[[], Message]) -> None:
        """Send what ``news`` returns about every second from now on.

        The thread waits for nothing but its clock and the pipe, and holds no lock but its own,
        because data loaders may be forked at any time.

        Args:
            rank: Rank of this process.
            news: Called in a thread of its own.
        """
        self._rank = rank
        threading.Thread(
            target=self._repeat, args=(news,), name="hvd-autosync-sender", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop the periodic messages; :meth:`send` still works."""
        self._stopped.set()

    def send(self, compose: Callable[[], Message]) -> None:
        """Send one message.

        Args:
            compose: Returns the message. It is called when it is the message's turn, so that the
                contents of messages are in the same order as the messages.
        """
        with self._lock:
            message, number = compose(), self._number
            self._number += 1
            try:
                write_message(self._fd, self._key, self._rank, number, message)
            except OSError:
                exit_with_children(_UNREAD_STATUS)

    def _repeat(self, news: Callable[[], Message]) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            self.send(news)
