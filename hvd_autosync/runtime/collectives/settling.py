"""What parts of this package have under way between two steps: some can be finished on demand."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

_SETTLED: list[Callable[[], None]] = []
#: What makes steps without a barrier now; on all ranks, or on none.
without_barrier: weakref.WeakSet[object] = weakref.WeakSet()


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


def steps_without_barrier() -> bool:
    """Return whether an optimizer makes steps without a barrier now; the same on all ranks."""
    if without_barrier:
        gc.collect()  # one that the script has dropped may be alive on some ranks only
    return bool(without_barrier)
