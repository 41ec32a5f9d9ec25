"""When to try again what did not pay."""

from __future__ import annotations

#: After a try that did not pay, this many steps at most go without one, including the step of the
#: try.
_MOST_STEPS = 64


class Backoff:
    """Lets a try that did not pay be followed by steps without one; their number doubles each time.

    Ranks decide alike if they count the same steps and see the same outcomes.
    """

    def __init__(self) -> None:
        self._left = 0
        self._next = 1

    def skips(self) -> bool:
        """Return whether this step, which counts, goes without a try."""
        self._left -= 1
        return self._left >= 0

    def tried(self, *, paid: bool) -> None:
        """Record the outcome of a try."""
        self._left = 0 if paid else self._next - 1
        self._next = 1 if paid else min(2 * self._next, _MOST_STEPS)
