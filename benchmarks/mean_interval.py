"""The mean of some numbers, with its interval from Student's distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.stats import t as student


def mean_interval(values: Sequence[float], level: float) -> tuple[float, float, float]:
    """The mean, and the lower and the upper end of its interval; NaN of fewer than two values.

    Args:
        values: At least one.
        level: Of the two-sided interval, such as 0.9.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(student.ppf(0.5 + level / 2, len(values) - 1)) * error
    return mean, mean - half, mean + half
