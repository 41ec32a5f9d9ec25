"""Observations: a strategy and its step time, or that its trial failed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_autosync.search_space import Strategy


@dataclass(frozen=True)
class Observation:
    """The outcome of one trial as a learner gets it.

    Each repeated trial of a strategy is an observation of its own.

    Attributes:
        strategy: The strategy that was tried.
        step_s: Trimmed mean of its step times, seconds; ``None`` if the trial failed. Numbers
            that cannot be a duration (NaN, infinite, 0 or less) count as failed, too.
        standard_error_s: Standard error of that mean, from the spread of the steps, seconds.
    """

    strategy: Strategy
    step_s: float | None
    standard_error_s: float = 0.0

    @property
    def measured(self) -> bool:
        """Whether the trial has a valid step time."""
        return self.step_s is not None and math.isfinite(self.step_s) and self.step_s > 0

    @property
    def log_step(self) -> float:
        """Natural logarithm of the step time in seconds; NaN when the trial failed."""
        return math.log(self.step_s) if self.step_s is not None and self.measured else math.nan

    @property
    def log_variance(self) -> float:
        """Variance of :attr:`log_step` by the delta method, (standard error / mean)^2, at most 1.

        A standard error that is NaN or infinite counts as 0: the model learns further noise itself.
        """
        if self.step_s is None or not self.measured or not math.isfinite(self.standard_error_s):
            return 0.0
        return min(abs(self.standard_error_s) / self.step_s, 1.0) ** 2
