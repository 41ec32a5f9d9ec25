"""Which rank runs next, among ranks in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_autosync.runtime.collectives.over_threads.ranks import ThreadRanks

#: Turns of each rank in which nothing happens, as in a loop that polls, until they count as stuck.
_IDLE_TURNS = 2000
#: Without turns, the pause of a poll that finds an operation not done.
_PAUSE_S = 1e-4


class Turns:
    """One rank at a time, in an order that is drawn."""

    def __init__(self, ranks: ThreadRanks) -> None:
        self._ranks = ranks
        self._ready: dict[int, Callable[[], bool]] = dict.fromkeys(ranks.names, lambda: True)
        #: Held until the rank gets its turn.
        self._turns = {rank: threading.Lock() for rank in ranks.names}
        for turn in self._turns.values():
            turn.acquire()
        self._idle = 0
        self.lock: AbstractContextManager[Any] = nullcontext()

    def begin(self, rank: int) -> None:
        """Wait for the first turn."""
        self._turns[rank].acquire()

    def start(self) -> None:
        """Give the first turn."""
        self._turns[self._next()].release()

    def switch(self, rank: int, ready: Callable[[], bool], *, idle: bool = False) -> None:
        """Let other ranks run, and go on when ``ready()`` holds."""
        self._idle = self._idle + 1 if idle else 0
        if self._idle > _IDLE_TURNS * len(self._ranks.alive):
            self._ranks.fail_if_stuck()
        self._ready[rank] = ready
        chosen = self._next(besides=rank if idle else None)
        if chosen != rank:
            self._turns[chosen].release()
            self._turns[rank].acquire()

    def leave(self, rank: int) -> None:
        """A rank has ended."""
        if self._ranks.alive:
            self._turns[self._next()].release()

    def _next(self, besides: int | None = None) -> int:
        """Draw a rank that can go on, another one than ``besides`` if there is any."""
        able = [rank for rank in sorted(self._ranks.alive) if self._ready[rank]()]
        able = [rank for rank in able if rank != besides] or able
        if not able:
            self._ranks.fail_if_stuck()
            able = sorted(self._ranks.alive)
        return self._ranks.random.choice(able)


class Free:
    """All ranks at once."""

    def __init__(self, ranks: ThreadRanks) -> None:
        self._ranks = ranks
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._changed = threading.Condition()
        self.lock: AbstractContextManager[Any] = self._changed

    def begin(self, rank: int) -> None:
        """Do nothing: no turn is needed."""

    def start(self) -> None:
        """Do nothing: ranks have begun."""

    def switch(self, rank: int, ready: Callable[[], bool], *, idle: bool = False) -> None:
        """Wait until ``ready()`` holds."""
        self._waiting[rank] = ready
        self._check()
        self._changed.notify_all()
        if idle:
            self._changed.wait(_PAUSE_S)
        self._changed.wait_for(ready)
        del self._waiting[rank]

    def leave(self, rank: int) -> None:
        """A rank has ended."""
        self._check()
        self._changed.notify_all()

    def _check(self) -> None:
        waiting = self._waiting
        if self._ranks.alive <= waiting.keys() and not any(ready() for ready in waiting.values()):
            self._ranks.fail_if_stuck()
