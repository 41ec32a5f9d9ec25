"""Steps of a training with a share of the work under BSP and the rest async (Sync-Switch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_autosync.cost.coefficients import Coefficients
from hvd_autosync.cost.prepared import Prepared
from hvd_autosync.cost.timeline import FloatArray


@dataclass(frozen=True)
class Phases:
    """Steps under ``c`` strategies.

    Attributes:
        sync: Steps under BSP.
        without_barrier: Steps without a barrier; ``None`` if all work is under BSP.
        share: Share of the work under BSP, shape ``(c,)``.
    """

    sync: Prepared
    without_barrier: Prepared | None
    share: FloatArray

    @property
    def typical(self) -> Prepared:
        """The steps in the phase that has most of the work of the first strategy."""
        return (
            self.sync
            if self.without_barrier is None or self.share[0] >= 0.5
            else self.without_barrier
        )

    def seconds(self, coefficients: Sequence[Coefficients]) -> FloatArray:
        """Return the mean seconds of a step, ``(b, c)`` for ``b`` sets of coefficients."""
        sync_s = self.sync.seconds(coefficients)
        if self.without_barrier is None:
            return sync_s
        async_s = self.without_barrier.seconds(coefficients)
        mean_s: FloatArray = self.share * sync_s + (1 - self.share) * async_s
        return mean_s
