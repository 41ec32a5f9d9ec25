"""Steps that a gradient scaler of mixed precision skips because gradients have overflowed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hvd_autosync.util import patches


def watch_scalers() -> None:
    """Tell our optimizers, from now on, which steps a scaler has skipped.

    Where gradients are exchanged, all ranks skip the same steps. Under local steps, a rank that
    skips alone would reach the end of its round later than the others.
    """
    patches.install("skipped steps", _watching)


def _watching(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def watched(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, optimizer, *args, **kwargs)
        after_skip = getattr(optimizer, "_hvd_autosync_after_skip", None)
        if after_skip is not None:
            after_skip()
        return result

    return watched
