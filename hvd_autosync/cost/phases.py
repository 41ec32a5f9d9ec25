"""Steps of a training whose ranks wait for each other for a share of the work (Sync-Switch)."""

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
        waiting: As ranks wait for each other.
        pushing: As they do not; ``None`` where they always do.
        share: Share of the work for which they wait, shape ``(c,)``.
    """

    waiting: Prepared
    pushing: Prepared | None
    share: FloatArray

    @property
    def typical(self) -> Prepared:
        """Steps of the first strategy in the phase that most of its work is in."""
        return self.waiting if self.pushing is None or self.share[0] >= 0.5 else self.pushing

    def seconds(self, coefficients: Sequence[Coefficients]) -> FloatArray:
        """Seconds of a step on average, shape ``(b, c)`` for ``b`` sets of coefficients."""
        waiting_s = self.waiting.seconds(coefficients)
        if self.pushing is None:
            return waiting_s
        pushing_s = self.pushing.seconds(coefficients)
        mean_s: FloatArray = self.share * waiting_s + (1 - self.share) * pushing_s
        return mean_s
