"""A clock that stands still while its process is stopped."""

from __future__ import annotations

import threading
import time

#: Most of the time between two looks that counts, seconds: in a longer one this process was
#: stopped, as where a batch system suspends a job.
_LONGEST_LOOK_S = 5.0


class AwakeClock:
    """Seconds since the clock was made in which this process ran, for limits of other processes.

    A batch system suspends a job as a whole, so whatever is waited for stood still, too. Somebody
    has to look at the clock every few seconds; any thread may.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked, self._awake_s = time.monotonic(), 0.0

    def now(self) -> float:
        """Return the seconds until now."""
        with self._lock:
            now = time.monotonic()
            self._awake_s += min(now - self._looked, _LONGEST_LOOK_S)
            self._looked = now
            return self._awake_s
