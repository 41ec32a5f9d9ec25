"""A constrained Bayesian search for the share: the fastest that surely enough keeps the target.

The time of a run is linear in the share, T(f) = f T_bsp + (1 - f) T_async, known after two runs.
Whether a share keeps the target is known with a probability (:mod:`curve`). A share is accepted
where that is high enough; the next one to try is where the time that it would save beyond the
accepted one, times the probability that it may, is largest: constrained expected improvement
(Gardner et al., "Bayesian Optimization with Inequality Constraints", ICML 2014) with an objective
that is known. It ends where that is too little, where runs are no faster with less BSP, or after
so many runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_autosync.recurring.curve import keeps
from hvd_autosync.recurring.outcomes import Decision, Goal, Outcome, Settings, at_share, goal_of

#: Shares that are tried; finer where accuracy is won.
SHARES = (0.0, 0.01, 0.02, 0.03, 0.045, 0.0625, 0.09, 0.125, 0.175, 0.25, 0.35, 0.5, 0.65, 0.8, 1.0)
#: Most runs at one of them: what two do not show is closer to the bound than it is worth to know.
_MOST_AT_ONE = 2
#: Probability that the metric's curve is like none that is known: then what keeps the target may
#: begin anywhere between the largest share that missed it and the one that is accepted.
_UNLIKE = 0.25
#: How much faster than BSP the rest is taken to be until runs have shown it.
_EXPECTED_SPEED = 2.0
#: Runs under less than BSP alone from which it is believed that they are no faster.
_BELIEVED = 2


@dataclass(frozen=True)
class Times:
    """What a run takes.

    Attributes:
        bsp: Under BSP alone, seconds.
        rest: Without any BSP.
    """

    bsp: float
    rest: float

    def at(self, share: float) -> float:
        """At that share; never nothing, wherever the line leads."""
        return max(share * self.bsp + (1 - share) * self.rest, 0.01 * self.bsp)


def times_of(outcomes: Sequence[Outcome]) -> Times:
    """The line through the durations of the runs, by least squares."""
    runs = [(e.share, e.seconds) for e in outcomes if e.finite and math.isfinite(e.seconds)]
    if len({share for share, _ in runs}) < 2:
        bsp = float(np.mean([seconds for _, seconds in runs])) if runs else 1.0
        return Times(bsp, bsp / _EXPECTED_SPEED)
    shares, seconds = np.array(runs).T
    slope, rest = np.polyfit(shares, seconds, 1)
    return Times(float(rest + slope), float(rest))


class BayesianSearch:
    """Tries what promises to save most.

    Args:
        settings: What is searched for.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def next_share(self, outcomes: Sequence[Outcome]) -> Decision:
        """The next share, or the fastest that was accepted."""
        settings = self._settings
        goal = goal_of(outcomes, settings)
        if isinstance(goal, Decision):
            return goal
        shares = np.array(SHARES)
        likely = keeps(outcomes, goal, shares, settings.target is not None)
        tried = min(each.share for each in outcomes if each.finite)
        accepted = (likely >= settings.confidence) & (shares >= tried)
        accepted[-1] = True
        place = int(np.argmax(accepted))
        best, sure = SHARES[place], float(likely[place])
        times = times_of(outcomes)
        others = [each for each in outcomes if each.share < 1]
        if others and times.rest > (1 - settings.gain) * times.bsp:
            if len(others) < _BELIEVED:
                reason = "a run with less BSP was no faster; once more, to be sure"
                return Decision(others[-1].share, False, reason)
            return Decision(1.0, True, "runs are no faster with less BSP")
        saved = (times.at(best) - np.array([times.at(f) for f in SHARES])) / times.at(best)
        counts = np.array([len(at_share(outcomes, f)) for f in SHARES])
        open_ = (shares < best) & (counts < _MOST_AT_ONE)
        missed = [f for f in SHARES if f < best and _missed(at_share(outcomes, f), goal)]
        worst = max(missed, default=0.0)
        anywhere = np.clip((shares - worst) / (best - worst), 0, 1) if best > 0 else shares
        hope = (1 - _UNLIKE) * likely + _UNLIKE * anywhere
        promise = np.where(open_, saved * hope, -math.inf)
        next_place = int(np.argmax(promise))
        said = "BSP alone" if best == 1 else f"it keeps {goal.bound:.6g} with {sure:.0%}"
        if promise[next_place] < settings.gain:
            reason = f"no other share promises to save {settings.gain:.0%}"
            return Decision(best, True, f"{said}, and {reason}")
        if len(outcomes) >= settings.runs:
            return Decision(best, True, f"{said} after {len(outcomes)} runs")
        reason = (
            f"it saves {saved[next_place]:.0%} of a run at {best:.4g} and keeps {goal.bound:.6g} "
            f"with {hope[next_place]:.0%}"
        )
        return Decision(SHARES[next_place], False, reason)


def _missed(runs: Sequence[Outcome], goal: Goal) -> bool:
    return bool(runs) and not goal.kept_by(runs)
