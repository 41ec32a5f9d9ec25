"""Fallback from a lossy strategy: training continues uncompressed and synchronous."""

from __future__ import annotations

from typing import Any

from hvd_autosync.runtime import current


def fall_back_to_exact(self: Any) -> None:
    """Exchange gradients uncompressed in every step from now on."""
    if self._guard is not None:
        self._guard.about_to_join()  # nothing would wait for what it has sent
    self._guard, self._exact = None, True
    self._exchange.dispatcher.drop_codecs()
    if self._phases is not None:
        self._phases.stop()
    if current.run_summary is not None:
        current.run_summary.fell_back = True
    current.watch = None  # longer steps are expected now
