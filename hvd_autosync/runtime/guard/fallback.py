"""Fallback from a lossy strategy: training continues uncompressed and synchronous."""

from __future__ import annotations

from typing import Any

from hvd_autosync.runtime import current


def fall_back_to_exact(optimizer: Any, *, together: bool = False) -> None:
    """Exchange gradients uncompressed in every step from now on.

    Args:
        optimizer: Horovod's optimizer, of our class.
        together: Whether all ranks call it after the same step, as for a collective; else they load
            a checkpoint that was saved after a fallback.
    """
    optimizer._sync.make_exact(together=together)
    if current.run_summary is not None:
        current.run_summary.fell_back = True
    current.watch = None  # longer steps are expected now
    if current.live is not None:
        current.live.watch = None
        if together:
            current.live.lossy_ended()
