"""Detects stragglers from the compute time of each rank.

Sync-Switch (Li et al., ICDCS 2021, section on online straggler detection) flags a worker whose
throughput stays below the mean minus one standard deviation of all workers for several windows.
With few ranks this is nearly always true of some rank: of four equal ones the slowest lies about
one deviation off. So here a rank is compared with the median of the *others*, and must be slower by
a relevant factor and by more than the noise explains::

    e        = log(own seconds / median of the others' seconds)
    noise    = robust deviation of e between neighboring windows, over all ranks
    upper(n) = max(log(margin), deviations * noise / sqrt(n)),    lower = log(margin) / 2

A rank becomes a straggler when its mean e over the last n windows is above ``upper(n)``: either
with n equal to ``enter`` and none of these below ``lower``; or, if noise hides it from so few, with
four times as many windows, the last ``enter`` of them above the margin. It recovers when the mean
of the last ``leave`` windows is below ``lower`` and none of them is above ``upper(1)``. So one or
two windows neither make a straggler nor end one. Effects on all ranks, such as a stall of the
machine or growing batches, cancel out of e; if most ranks are slow, none is a straggler.

The result is deterministic and independent of the rank: from equal numbers all ranks draw the same
conclusion.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

#: Neighboring windows from which the noise is estimated.
_MEMORY = 32
#: The prior noise, and its weight in windows.
_EXPECTED_NOISE, _EXPECTATION_WEIGHT = 0.1, 8.0
#: The median of the magnitude of a normal deviate of standard deviation 1.
_NORMAL_MEDIAN = 0.6745
#: Smallest ratio of a straggler's compute time to that of the others, as a logarithm.
_MARGIN = math.log(1.25)
#: Smallest distance from one other rank, in deviations of the noise.
_DEVIATIONS = 5.0
#: Windows that make a straggler, or end one.
_WINDOWS = 4
#: Windows of the longer test.
_MORE_WINDOWS = 4 * _WINDOWS


class Detector:
    """Detects stragglers, window by window.

    Args:
        ranks: The number of ranks.

    Attributes:
        slow: The current stragglers.
        noise: Standard deviation of e of a rank that is like the others.
    """

    def __init__(self, ranks: int) -> None:
        self.slow: frozenset[int] = frozenset()
        self.noise = _EXPECTED_NOISE
        # Of many ranks the slowest is further off. This keeps the rate of false alarms for any
        # number of them: the tail of a normal deviate z is about exp(-z^2 / 2).
        self._deviations = math.sqrt(_DEVIATIONS**2 + 2 * math.log(max(ranks, 2) / 2))
        #: For each rank: e of the last windows, and e of the very last one.
        self._recent: list[deque[float]] = [deque(maxlen=_MORE_WINDOWS) for _ in range(ranks)]
        self._before: list[float | None] = [None] * ranks
        #: For each window: the median change of e since the one before.
        self._changes: deque[float] = deque(maxlen=_MEMORY)

    def window(self, seconds_of_compute_per_step: Sequence[float]) -> frozenset[int]:
        """Take the next window; returns the current stragglers.

        Args:
            seconds_of_compute_per_step: For each rank. The median over the window's steps is better
                than their mean, because single stalls make no straggler. A value that is not a
                positive number is unknown: that rank keeps its status.
        """
        excess = excesses(seconds_of_compute_per_step)
        self._learn_noise(excess)
        for rank, own in enumerate(excess):
            if own is not None:
                self._recent[rank].append(own)
                changes = self._recovers if rank in self.slow else self._falls_behind
                if changes(list(self._recent[rank])):
                    self.slow ^= {rank}
        return self.slow

    def stands_out(self, rank: int) -> bool:
        """Return whether that rank was slow in the last window, beyond the noise of one window."""
        recent = self._recent[rank]
        return bool(recent) and recent[-1] > self._upper(1)

    def _falls_behind(self, recent: list[float]) -> bool:
        last = recent[-_WINDOWS:]
        if len(last) < _WINDOWS or _mean(last, 2 * self._upper(1)) <= _MARGIN:
            return False
        if min(last) >= _MARGIN / 2 and self._is_above(last):
            return True
        return len(recent) >= _MORE_WINDOWS and self._is_above(recent[-_MORE_WINDOWS:])

    def _is_above(self, last: list[float]) -> bool:
        upper = self._upper(len(last))
        return _mean(last, 2 * self._upper(_WINDOWS)) > upper

    def _recovers(self, recent: list[float]) -> bool:
        last = recent[-_WINDOWS:]
        enough = len(last) == _WINDOWS and max(last) <= self._upper(1)
        return enough and statistics.fmean(last) < _MARGIN / 2

    def _upper(self, windows: int) -> float:
        return max(_MARGIN, self._deviations * self.noise / math.sqrt(windows))

    def _learn_noise(self, excess: Sequence[float | None]) -> None:
        """Update the noise from changes, so that a constant lag of a rank is no noise."""
        changes = [
            abs(now - before) / math.sqrt(2)
            for now, before in zip(excess, self._before, strict=True)
            if now is not None and before is not None
        ]
        self._before = list(excess)
        if changes:
            self._changes.append(statistics.median(changes) / _NORMAL_MEDIAN)
        if self._changes:
            seen, count = statistics.median(self._changes), len(self._changes)
            weight = _EXPECTATION_WEIGHT * (1 - count / _MEMORY)
            self.noise = (count * seen + weight * _EXPECTED_NOISE) / (count + weight)


def _mean(values: Sequence[float], most: float) -> float:
    """Return the mean, with each value limited so that a single outlier cannot dominate."""
    return statistics.fmean(min(each, most) for each in values)


def excesses(seconds: Sequence[float]) -> list[float | None]:
    """``e`` of each rank; ``None`` if its seconds, or all other ranks', are no positive number."""
    ordered = sorted(each for each in seconds if 0 < each < math.inf)
    if len(ordered) < 2:
        return [None] * len(seconds)
    return [
        math.log(each / _median_without(ordered, each)) if 0 < each < math.inf else None
        for each in seconds
    ]


def _median_without(ordered: Sequence[float], one: float) -> float:
    """Return the median of a sorted sequence without one element equal to ``one``."""
    place, last = bisect_left(ordered, one), len(ordered) - 2
    low, high = (ordered[i + (i >= place)] for i in (last // 2, (last + 1) // 2))
    return low + (high - low) / 2
