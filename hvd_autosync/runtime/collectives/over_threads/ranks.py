"""Ranks in threads: their operations, failures and ends."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hvd_autosync.runtime.collectives.operations import using
from hvd_autosync.runtime.collectives.over_threads.calls import Call, perform
from hvd_autosync.runtime.collectives.over_threads.rank import ThreadRank
from hvd_autosync.runtime.collectives.over_threads.turns import Free, Turns
from hvd_autosync.runtime.collectives.protocol import CollectiveError

_T = TypeVar("_T")
#: Polls by which a rank may learn late that an operation is done; drawn for each.
_LATE = (0, 0, 0, 1, 2, 5)


class RankDied(BaseException):
    """Ends a rank that is to die; no ``except Exception`` of the tested code stops it."""


class ThreadRanks:
    """Some ranks of this process.

    Args:
        size: How many.
        seed: The order of their turns, and which operations are noticed late.
        hosts: How many hosts they are on; all have the same number of ranks.
        turns: Whether one rank runs at a time.
        dies: Rank -> the number of its call, from 0, in which it dies.
        breaks_at: The operation, counted from 0 in the order in which they are done, that fails on
            all ranks, and with it all later ones.
        limit_s: Longest time for all ranks to end. Ranks that cannot go on are noticed without it;
            so it is for code that never ends, and long enough for a machine that stands still.

    Attributes:
        calls: The operations of each kind, over all ranks.
        sent_bytes: The bytes of their tensors.
        names: Rank -> the names of its operations, in order.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        hosts: int = 1,
        turns: bool = True,
        dies: Mapping[int, int] | None = None,
        breaks_at: int | None = None,
        limit_s: float = 120.0,
    ) -> None:
        self.size, self.hosts = size, hosts
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        self.names: dict[int, list[str]] = {rank: [] for rank in range(size)}
        self.random = random.Random(seed)
        self._scheduler = Turns(self) if turns else Free(self)
        self._dies, self._breaks_at, self._limit_s = dict(dies or {}), breaks_at, limit_s
        self._performed = 0
        #: Ranks and name -> the calls that wait for those of other ranks.
        self._pending: dict[tuple[tuple[int, ...], str], dict[int, Call]] = {}
        self._handles: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._joined: list[int] = []
        self._joins = 0
        self._last_joined = -1
        #: Ranks that have not ended.
        self.alive = set(range(size))
        #: What each rank waits for.
        self.waits_for: dict[int, str] = {}
        #: Why all operations fail from now on.
        self.failure = ""

    def run(self, bodies: Callable[[], _T] | Sequence[Callable[[], _T]]) -> list[_T]:
        """Call a function as each rank, in a thread of its own; returns what they return.

        Args:
            bodies: One function for all ranks, or one for each.

        Raises:
            BaseException: What the first rank that failed has raised, unless it was to die, or has
                failed because of another one. :meth:`outcomes` returns them all.
        """
        outcomes = self.outcomes(bodies)
        raised = [each for each in outcomes if isinstance(each, BaseException)]
        own = [each for each in raised if not isinstance(each, (RankDied, CollectiveError))]
        for error in [*own, *raised]:
            raise error
        return [each for each in outcomes if not isinstance(each, BaseException)]

    def outcomes(
        self, bodies: Callable[[], _T] | Sequence[Callable[[], _T]]
    ) -> list[_T | BaseException]:
        """As :meth:`run`; returns for each rank what it has returned or raised."""
        each_body = [bodies] * self.size if callable(bodies) else bodies
        outcomes: list[_T | BaseException] = [TimeoutError("it has not ended")] * self.size

        def live(rank: int) -> None:
            self._scheduler.begin(rank)
            try:
                with using(ThreadRank(self, rank)):
                    outcomes[rank] = each_body[rank]()
            except BaseException as error:
                outcomes[rank] = error
            finally:
                with self._scheduler.lock:
                    self._end(rank, outcomes[rank])

        threads = [
            threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        self._scheduler.start()
        deadline = time.monotonic() + self._limit_s
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        if any(thread.is_alive() for thread in threads):
            running = sorted(self.alive - self.waits_for.keys())
            raise TimeoutError(
                f"ranks {sorted(self.alive)} have not ended within {self._limit_s} s; ranks "
                f"{running} are not in an operation; {self._describe_waits()}"
            )
        return outcomes

    def begin(self, call: Call, members: tuple[int, ...]) -> int:
        """Take one rank's call; returns its handle."""
        with self._scheduler.lock:
            self._count(call)
            if self.failure:
                raise CollectiveError(self.failure)
            calls = self._pending.setdefault((members, call.name), {})
            if call.rank in calls:
                raise CollectiveError(
                    f"rank {call.rank} calls {call.name!r} again before its first call is done"
                )
            calls[call.rank] = call
            handle = next(self._numbers)
            self._handles[handle] = call
            self._advance()
            self._scheduler.switch(call.rank, lambda: True)
            return handle

    def poll(self, rank: int, handle: int) -> bool:
        """Return whether an operation is done, as far as its rank knows."""
        with self._scheduler.lock:
            call = self._handles[handle]
            self._scheduler.switch(rank, lambda: True, idle=not call.done)
            if call.done and call.late:
                call.late -= 1
                return False
            return call.done

    def synchronize(self, rank: int, handle: int) -> Any:
        """Wait for an operation; returns its output."""
        with self._scheduler.lock:
            call = self._handles.pop(handle)
            self._wait(rank, f"{call.kind} {call.name!r}", lambda: call.done)
            if call.error:
                raise CollectiveError(call.error)
            return call.result

    def join(self, rank: int) -> int:
        """Wait until all ranks have called it."""
        with self._scheduler.lock:
            self._die_if_due(rank)
            if self.failure:
                raise CollectiveError(self.failure)
            own = sorted(call.name for call in self._handles.values() if call.rank == rank)
            if own:  # Horovod may forget them
                raise CollectiveError(f"rank {rank} calls join() with {own} in progress")
            self._joined.append(rank)
            round_, self._last_joined = self._joins, rank
            self._advance()
            self._wait(rank, "join()", lambda: self._joins > round_)
            if self._joins == round_:
                raise CollectiveError(self.failure)
            return self._last_joined

    def pass_turn(self, rank: int) -> None:
        """Let other ranks run."""
        with self._scheduler.lock:
            self._scheduler.switch(rank, lambda: True, idle=True)

    def fail(self, why: str) -> None:
        """Let all operations fail, those in progress too."""
        self.failure = self.failure or why
        for calls in self._pending.values():
            for call in calls.values():
                call.done, call.error = True, self.failure
        self._pending.clear()

    def fail_if_stuck(self) -> None:
        """No rank can go on: tell all of them what they wait for."""
        self.fail(f"no rank can go on: {self._describe_waits()}")

    def _describe_waits(self) -> str:
        lines = [f"rank {rank} waits for {what}" for rank, what in sorted(self.waits_for.items())]
        for (members, name), calls in self._pending.items():
            missing = sorted(set(members) - calls.keys())
            lines.append(f"ranks {missing} have not called {name!r}")
        return "; ".join(lines) or "no operation is in progress"

    def _count(self, call: Call) -> None:
        self._die_if_due(call.rank)
        self.calls[call.kind] += 1
        self.sent_bytes[call.kind] += call.tensor.numel() * call.tensor.element_size()
        self.names[call.rank].append(call.name)

    def _die_if_due(self, rank: int) -> None:
        left = self._dies.get(rank)
        if left == 0:
            raise RankDied(f"rank {rank} was to die")
        if left is not None:
            self._dies[rank] = left - 1

    def _wait(self, rank: int, what: str, ready: Callable[[], bool]) -> None:
        self.waits_for[rank] = what
        self._scheduler.switch(rank, lambda: bool(self.failure) or ready())
        del self.waits_for[rank]

    def _end(self, rank: int, outcome: Any) -> None:
        self.alive.discard(rank)
        if isinstance(outcome, BaseException):
            self.fail(f"rank {rank} is gone: {type(outcome).__name__}: {outcome}")
        self._advance()
        self._scheduler.leave(rank)

    def _advance(self) -> None:
        """Do what all ranks have called, and end ``join()`` once all wait there."""
        for (members, name), calls in [*self._pending.items()]:
            missing = set(members) - calls.keys()
            if missing - set(self._joined):
                gone = sorted(missing - self.alive)
                if gone:
                    self._finish(members, name, calls, f"ranks {gone} have ended without {name!r}")
                continue
            if self._performed == self._breaks_at:
                self.fail(f"{name!r} was to fail")
                return
            self._performed += 1
            parts = [calls[rank] for rank in members if rank in calls]
            self._finish(members, name, calls, perform(parts, len(missing)))
        if len(self._joined) == self.size:
            self._joined.clear()
            self._joins += 1

    def _finish(
        self, members: tuple[int, ...], name: str, calls: Mapping[int, Call], error: str
    ) -> None:
        del self._pending[members, name]
        for call in calls.values():
            call.done, call.error = True, error
            call.late = self.random.choice(_LATE)
