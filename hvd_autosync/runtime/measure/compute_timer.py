"""Times how long this rank computes, without the time it waits."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from time import perf_counter

#: Steps of a window, over which single stalls do not count.
WINDOW = 8


class Waiting:
    """A context whose seconds are added to an account of waiting, unless it fails.

    Every step enters it several times, so it is no generator.

    Args:
        account: Adds seconds.
    """

    __slots__ = ("_account", "_began_s")

    def __init__(self, account: Callable[[float], object]) -> None:
        self._account = account

    def __enter__(self) -> None:
        self._began_s = perf_counter()

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _traceback: object
    ) -> None:
        if error is None:
            self._account(perf_counter() - self._began_s)


class ComputeTimer:
    """Compute time of this rank's last steps, without waiting for other ranks."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._began_s = perf_counter()
        self._waited_s = 0.0

    def waited(self, seconds: float) -> None:
        """Add seconds of the current step that were spent waiting for other ranks."""
        self._waited_s += seconds

    def stepped(self) -> float:
        """End a step; returns its compute time, seconds."""
        now_s = perf_counter()
        computed = now_s - self._began_s - self._waited_s
        self._recent.append(computed)
        self._began_s, self._waited_s = now_s, 0.0
        return computed

    @property
    def seconds(self) -> float:
        """Median compute time of a step in the last window, seconds; 0 before the first step."""
        return statistics.median(self._recent) if self._recent else 0.0
