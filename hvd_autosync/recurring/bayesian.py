"""Constrained Bayesian search for the share: the fastest that keeps the target with confidence.

The time of a run is linear in the share, T(f) = f T_bsp + (1 - f) T_async, known after two runs.
:mod:`hvd_autosync.recurring.curve` gives the probability that a share keeps the target. A share is
accepted if that is high enough. The next share to try maximizes the time saved over the accepted
one, times the probability that the share keeps the target: constrained expected improvement
(Gardner et al., "Bayesian Optimization with Inequality Constraints", ICML 2014) with a known
objective. The search ends if the maximum is too small, if runs are no faster with less BSP, or
after a number of runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_autosync.recurring.curve import keeps
from hvd_autosync.recurring.outcomes import (
    Goal,
    NextShare,
    RecurringOutcome,
    SearchSettings,
    at_share,
    goal_of,
)
from hvd_autosync.util.amounts import amount

#: The shares that are tried; denser where the accuracy rises.
SHARES = (0.0, 0.01, 0.02, 0.03, 0.045, 0.0625, 0.09, 0.125, 0.175, 0.25, 0.35, 0.5, 0.65, 0.8, 1.0)
#: Largest number of runs at one share: if two are inconclusive, the share is too close to the bound
#: to be worth further runs.
_MOST_AT_ONE = 2
#: Probability that the metric follows none of the modelled curves. Then the smallest share that
#: keeps the target is uniform between the largest share that missed it and the accepted one.
_UNLIKE = 0.25
#: Assumed speedup of async over BSP before runs have measured it.
_EXPECTED_SPEED = 2.0
#: Number of runs with less BSP after which "no faster" is accepted.
_RUNS_TO_REJECT = 2


@dataclass(frozen=True)
class Times:
    """The duration of a run as a function of the share.

    Attributes:
        bsp: Seconds with BSP only.
        rest: Seconds without BSP.
    """

    bsp: float
    rest: float

    def at(self, share: float) -> float:
        """Return the seconds at ``share``; at least 1 % of those with BSP only."""
        return max(share * self.bsp + (1 - share) * self.rest, 0.01 * self.bsp)


def times_of(outcomes: Sequence[RecurringOutcome]) -> Times:
    """Fit a line to the durations of the runs by least squares."""
    runs = [(e.share, e.seconds) for e in outcomes if e.finite and math.isfinite(e.seconds)]
    if len({share for share, _ in runs}) < 2:
        bsp = float(np.mean([seconds for _, seconds in runs])) if runs else 1.0
        return Times(bsp, bsp / _EXPECTED_SPEED)
    shares, seconds = np.array(runs).T
    slope, rest = np.polyfit(shares, seconds, 1)
    return Times(float(rest + slope), float(rest))


class BayesianSearch:
    """Tries the share with the largest expected saving.

    Args:
        settings: The settings of the search.
    """

    def __init__(self, settings: SearchSettings) -> None:
        self._settings = settings

    def next_share(self, outcomes: Sequence[RecurringOutcome]) -> NextShare:
        """Return the next share, or the fastest accepted one."""
        settings = self._settings
        goal = goal_of(outcomes, settings)
        if isinstance(goal, NextShare):
            return goal
        shares = np.array(SHARES)
        likely = keeps(outcomes, goal, shares, settings.target is not None)
        tried = min(each.share for each in outcomes if each.finite)
        accepted = (likely >= settings.confidence) & (shares >= tried)
        accepted[-1] = True
        place = int(np.argmax(accepted))
        best, sure = SHARES[place], float(likely[place])
        times = times_of(outcomes)
        others = [e for e in outcomes if e.share < 1 and e.finite and math.isfinite(e.seconds)]
        if others and times.rest > (1 - settings.gain) * times.bsp:
            if len(others) < _RUNS_TO_REJECT:
                reason = "a run with less BSP was no faster; measuring it once more"
                return NextShare(others[-1].share, False, reason)
            return NextShare(1.0, True, "runs are no faster with less BSP")
        saved = (times.at(best) - np.array([times.at(f) for f in SHARES])) / times.at(best)
        counts = np.array([len(at_share(outcomes, f)) for f in SHARES])
        open_ = (shares < best) & (counts < _MOST_AT_ONE)
        worst = max((f for f in _missed(outcomes, goal) if f < best), default=0.0)
        anywhere = np.clip((shares - worst) / (best - worst), 0, 1) if best > 0 else shares
        probability = (1 - _UNLIKE) * likely + _UNLIKE * anywhere
        expected = np.where(open_, saved * probability, -math.inf)
        next_place = int(np.argmax(expected))
        found = (
            "BSP only"
            if best == 1
            else f"it keeps {goal.bound:.6g} with a probability of {sure:.0%}"
        )
        if expected[next_place] < settings.gain:
            reason = f"no other share is expected to save {settings.gain:.0%}"
            return NextShare(best, True, f"{found}, and {reason}")
        # Further ones of BSP alone, which the user has asked for, say nothing about other shares.
        if 1 + sum(each.share < 1 for each in outcomes) >= settings.runs:
            return NextShare(best, True, f"{found} after {amount(len(outcomes), 'run')}")
        reason = (
            f"it saves {saved[next_place]:.0%} of a run at {best:.4g} and keeps {goal.bound:.6g} "
            f"with a probability of {probability[next_place]:.0%}"
        )
        return NextShare(SHARES[next_place], False, reason)


def _missed(outcomes: Sequence[RecurringOutcome], goal: Goal) -> set[float]:
    """Return the shares whose runs have missed the target, as they were, not as planned."""
    shares = {each.share for each in outcomes}
    return {f for f in shares if not goal.kept_by([e for e in outcomes if e.share == f])}
