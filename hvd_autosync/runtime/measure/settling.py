"""From which step on a strategy that was attached in a running training is like itself."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from hvd_autosync.search_space.trial import MIN_MEASURED_STEPS

#: A step that has settled is at most so many median deviations, and at least may be so many times,
#: above the median of the later ones.
_DEVIATIONS, _ALIKE = 5.0, 1.05


def settled_after(steps: Sequence[float], warmup: int) -> int:
    """Return the number of first steps that are not to be measured.

    These are the warm-up, and the steps right after it that are all longer than the later ones: at
    most half of those that were to be measured, and never so many that too few are left. Later
    steps say nothing of settling, however long.

    Args:
        steps: Their durations, seconds.
        warmup: Number of the first steps that are never measured.
    """
    measured = steps[warmup:]
    early = min(len(measured) // 2, len(measured) - MIN_MEASURED_STEPS)
    if early <= 0:
        return warmup
    later = measured[early:]
    level = median(later)
    deviation = median(abs(each - level) for each in later)
    most = max(level + _DEVIATIONS * deviation, _ALIKE * level)
    long = next((place for place in range(early) if measured[place] <= most), early)
    return warmup + long
