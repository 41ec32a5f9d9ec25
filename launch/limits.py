"""How long a trial may take before it counts as hung, derived from the default's own times."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hvd_autosync.search_space import TrialResult

# A strategy may be many times slower than the default and still be alive: what must be told
# apart is slow and stuck, and a slow trial is cut short by its own steps.
_SETUP_FACTOR, _SETUP_SLACK_S = 3.0, 15.0
_STEP_FACTOR, _STEP_SLACK_S = 30.0, 10.0
_DEVIATIONS = 6.0


@dataclass(frozen=True)
class Limits:
    """Limits of one trial, seconds.

    Attributes:
        setup_s: From launch to the end of the first step.
        silence_s: From one finished step to the next.
        exit_s: From the last rank's end of the run to the launcher's exit.
        total_s: What is left of the minutes of the tuning.
    """

    setup_s: float = math.inf
    silence_s: float = math.inf
    exit_s: float = 30.0
    total_s: float = math.inf

    @classmethod
    def from_default(cls, result: TrialResult) -> Limits:
        """Limits for strategies of a job whose default trial gave ``result``.

        The slowest credible step is the median plus six median absolute deviations.
        """
        steps = np.concatenate([np.asarray(rank.step_s[1:]) for rank in result.ranks])
        median = float(np.median(steps))
        slow = max(median + _DEVIATIONS * float(np.median(abs(steps - median))), steps.max())
        return cls(
            setup_s=_SETUP_FACTOR * result.setup_s + _SETUP_SLACK_S,
            silence_s=_STEP_FACTOR * float(slow) + _STEP_SLACK_S,
        )
