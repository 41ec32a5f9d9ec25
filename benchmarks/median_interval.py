"""The median of some numbers, with an interval that assumes nothing of their distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable


def median_interval(values: Iterable[float]) -> tuple[float, float, float]:
    """The median, and the lower and the upper end of its 95 % interval from order statistics."""
    ordered = sorted(values)
    count = len(ordered)
    half = 0.98 * math.sqrt(count)  # 1.96 standard deviations of a binomial with p = 1/2
    low = ordered[max(int(count / 2 - half), 0)]
    high = ordered[min(math.ceil(count / 2 + half), count - 1)]
    return statistics.median(ordered), low, high
