"""Loss envelope: sequential tests of the losses of a guarded training.

Three null hypotheses are tested with each window's mean:

- *The losses are as predicted.* Quality trials of the job predict mean and standard deviation of
  each window (:mod:`hvd_autosync.study.loss_prediction`). Let x(w) be the excess of window w over
  its predicted level and d(w) the deviation. Then z(k) = sum of x(w) over root of V(k), V(k) = sum
  of d(w)^2, w = 0 ... k, is standard normal, and may not exceed C sqrt(V(K) / V(k)), where K is the
  last predicted window (O'Brien and Fleming 1979): a large excess is detected at once, a small one
  at the end. Windows have equal weights, because a model that learns more slowly is not behind in
  the first windows, which vary least.
- *The loss does not rise.* Beyond the prediction, and without one, no window may be clearly above
  the lowest level so far.
- *The average of replicas is as good as they are.* Steps right after an average have its loss;
  their excess over the replicas' own losses is summed over all rounds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from hvd_autosync.search_space.trial import LossPrediction

#: C: 1 % of the trainings that are exactly as predicted exceed it in any of the tests (six tests;
#: checked by simulation in ``benchmarks/guard_alarms.py``).
_CRITICAL = 2.4
#: Windows that make a level, and the beginning.
_LEVEL = 4
#: A rise counts from this many deviations of a window, this share of the level, and this share of
#: the fall of the loss: a healthy loss that has fallen a lot fluctuates.
_DEVIATIONS, _RISE, _SHARE_OF_FALL = 6.0, 0.1, 0.2
#: For averages, summed over all rounds, half of that share suffices.
_RISE_OF_AVERAGES = 0.05
#: Numbers of the tests, beside the last windows.
_NUMBERS = (
    "windows",
    "_excess",
    "_variance",
    "_predicted",
    "_beginning",
    "_lowest",
    "_last",
    "_squares",
    "_largest",
    "_pairs",
    "_jumps",
    "_jumped",
)


def not_finite(mean: float) -> str:
    """Return why a mean loss is not accepted whatever it is a loss of; empty if it is finite."""
    return "" if math.isfinite(mean) else f"a mean loss of {mean:.4g} is not finite"


class LossEnvelope:
    """The tests of one training, in constant memory.

    Args:
        prediction: Predicted losses; without windows if nothing is known.
    """

    def __init__(self, prediction: LossPrediction | None = None) -> None:
        self._prediction = prediction or LossPrediction()
        #: Sums of x(w) and d(w)^2 so far, and the number of windows.
        self._excess, self._variance, self._predicted = 0.0, 0.0, 0
        self._recent: deque[float] = deque(maxlen=_LEVEL)
        #: Mean of the highest window of the beginning, and the lowest level.
        self._beginning, self._lowest = -math.inf, math.inf
        self._last = 0.0
        #: Sum, largest and number of squared differences of neighboring windows.
        self._squares, self._largest, self._pairs = 0.0, 0.0, 0
        #: Sum of the excess of averages over their replicas, and number of such losses.
        self._jumps, self._jumped = 0.0, 0.0
        #: Number of windows that were accepted.
        self.windows = 0

    def to_json(self) -> dict[str, Any]:
        """Return what the tests have seen, for :meth:`take`; some numbers may be infinite."""
        return {**{name: getattr(self, name) for name in _NUMBERS}, "recent": [*self._recent]}

    def take(self, seen: Mapping[str, Any]) -> None:
        """Go on from what the tests of another rank have seen (:meth:`to_json`)."""
        for name in _NUMBERS:
            setattr(self, name, seen[name])
        self._recent = deque(seen["recent"], maxlen=_LEVEL)

    def accepts(self, mean: float, window: int) -> str:
        """Test the mean loss of a window, and record it if it is accepted.

        Args:
            mean: The mean over the ranks.
            window: Its number.

        Returns:
            Why it is not accepted; empty if it is.
        """
        wrong = not_finite(mean) or self._as_predicted(mean, window) or self._not_risen(mean)
        if not wrong:
            if self._recent:
                square = (mean - self._last) ** 2
                self._squares += square
                self._largest = max(self._largest, square)
                self._pairs += 1
            self._recent.append(mean)
            self._last = mean
            self.windows += 1
            if len(self._recent) == _LEVEL:
                if self._lowest == math.inf:
                    self._beginning = max(self._recent)
                self._lowest = min(self._lowest, math.fsum(self._recent) / _LEVEL)
        return wrong

    def accepts_average(self, mean: float, count: float, losses: float) -> str:
        """Test losses right after averages; called after :meth:`accepts` of the same window.

        Args:
            mean: Their mean.
            count: Their number.
            losses: Number of all losses of the window.

        Returns:
            As of :meth:`accepts`.
        """
        if not math.isfinite(mean):
            return f"a mean loss of {mean:.4g} of averaged replicas is not finite"
        if self._lowest == math.inf:
            return ""  # the noise is not known yet
        jump = mean - self._last
        self._jumps += jump * count
        self._jumped += count
        for excess, number, share in (
            (jump, count, _RISE),
            (self._jumps / self._jumped, self._jumped, _RISE_OF_AVERAGES),
        ):
            # Their own noise, and that of the replicas' losses.
            noise = self._noise() * math.sqrt(losses / number + count / number)
            if excess > max(_DEVIATIONS * noise, share * abs(self._last)):
                return f"the average of replicas has a loss {excess:.4g} above their own"
        return ""

    def forget_prediction(self) -> None:
        """Test without the prediction from now on."""
        self._prediction = LossPrediction()

    def start_over(self) -> None:
        """Know nothing of the losses so far, and test without the prediction.

        That counts as a window: of several ranks' tests these have seen most then.
        """
        new = LossEnvelope()
        new.windows = self.windows + 1
        self.take(new.to_json())
        self.forget_prediction()

    def _as_predicted(self, mean: float, window: int) -> str:
        levels, deviations = self._prediction.levels, self._prediction.deviations
        if window >= len(levels):
            return ""
        self._excess += mean - levels[window]
        self._variance += deviations[window] ** 2
        self._predicted += 1
        if self._excess <= _CRITICAL * math.sqrt(math.fsum(each**2 for each in deviations)):
            return ""
        return (
            f"the loss is {self._excess / self._predicted:.3g} above what trials of this job "
            f"predict, {self._excess / math.sqrt(self._variance):.1f} deviations"
        )

    def _not_risen(self, mean: float) -> str:
        if self._lowest == math.inf:
            return ""
        fallen = max(self._beginning - self._lowest, 0.0)
        margin = max(
            _DEVIATIONS * self._noise(), _RISE * abs(self._lowest), _SHARE_OF_FALL * fallen
        )
        if mean <= self._lowest + margin:
            return ""
        return f"the loss has risen to {mean:.4g} from {self._lowest:.4g}"

    def _noise(self) -> float:
        """Standard deviation of a window's mean.

        It is estimated from differences of neighboring windows, so that a falling loss is no noise.
        The largest one is left out: the steep fall of the first windows is none either.
        """
        if self._pairs < 2:
            return 0.0
        return math.sqrt(max(self._squares - self._largest, 0.0) / (2 * (self._pairs - 1)))
