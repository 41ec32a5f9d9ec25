"""What parts of this package have under way between two steps, and finish on demand."""

from __future__ import annotations

from collections.abc import Callable

_SETTLED: list[Callable[[], None]] = []


def settle_before(function: Callable[[], None]) -> None:
    """Call ``function`` at the start of each re-initialization, to finish what it has under way.

    Args:
        function: Waits for nothing but operations that all ranks have started before the end of
            the step.
    """
    _SETTLED.append(function)


def settle() -> None:
    """Finish all that is under way between two steps."""
    for function in _SETTLED:
        function()
