"""Time limits above which a trial counts as hung, derived from the default trial."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hvd_autosync.search_space import TrialResult

# The limits are wide, because a strategy may be many times slower than the default without being
# stuck. A slow trial is pruned by its steps.
_SETUP_FACTOR, _SETUP_SLACK_S = 3.0, 15.0
_STEP_FACTOR, _STEP_SLACK_S = 30.0, 10.0
_DEVIATIONS = 6.0
#: Least limit of a step with an evaluation, a checkpoint or a new epoch, from the last sign of one.
LEAST_UNLIKE_S = 180.0


@dataclass(frozen=True)
class Limits:
    """Limits of one trial, seconds.

    Attributes:
        setup_s: From launch to the end of the first step.
        silence_s: From one finished step to the next, if both are like the others.
        exit_s: From the last rank's end of the run to the launcher's exit.
        total_s: Remaining time of the tuning, or of its quality trials.
    """

    setup_s: float = math.inf
    silence_s: float = math.inf
    exit_s: float = 30.0
    total_s: float = math.inf

    @classmethod
    def from_default(cls, result: TrialResult) -> Limits:
        """Derive the limits of all later trials from the result of the default trial.

        The slowest expected step is the median plus six median absolute deviations, or the slowest
        measured step if that is longer.
        """
        steps = np.concatenate([np.asarray(rank.step_s[1:]) for rank in result.ranks])
        median = float(np.median(steps))
        slow = max(median + _DEVIATIONS * float(np.median(abs(steps - median))), steps.max())
        return cls(
            setup_s=_SETUP_FACTOR * result.setup_s + _SETUP_SLACK_S,
            silence_s=_STEP_FACTOR * float(slow) + _STEP_SLACK_S,
        )
