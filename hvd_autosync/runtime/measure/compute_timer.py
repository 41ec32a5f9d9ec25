"""How long this rank computes, whatever it waits for."""

from __future__ import annotations

import statistics
from collections import deque
from time import perf_counter

#: Steps of a window: what single stalls are told from.
WINDOW = 8


class ComputeTimer:
    """The seconds of this rank's last steps, without waiting for other ranks."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._began_s = perf_counter()
        self._waited_s = 0.0

    def waited(self, seconds: float) -> None:
        """So much of the running step was spent waiting for other ranks."""
        self._waited_s += seconds

    def stepped(self) -> float:
        """A step is over; the seconds that it took to compute."""
        now_s = perf_counter()
        computed = now_s - self._began_s - self._waited_s
        self._recent.append(computed)
        self._began_s, self._waited_s = now_s, 0.0
        return computed

    @property
    def seconds(self) -> float:
        """Of a step, the median of the last window; 0 before the first."""
        return statistics.median(self._recent) if self._recent else 0.0
