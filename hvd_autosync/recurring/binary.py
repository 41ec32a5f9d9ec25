"""The binary search of Sync-Switch (Li et al., ICDCS 2021, section on the timing of the switch).

Shares are halved: where runs at ``f`` keep the target, less is tried, where they do not, more,
until ``M`` of them have been tried with ``R`` runs each. Whether runs are any
faster is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_autosync.recurring.outcomes import Decision, Outcome, Settings, at_share, goal_of


class BinarySearch:
    """Halves the shares.

    Args:
        settings: What is searched for.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def next_share(self, outcomes: Sequence[Outcome]) -> Decision:
        """The next share, or the least that kept the target."""
        goal = goal_of(outcomes, self._settings)
        if isinstance(goal, Decision):
            return goal
        low, high = 0.0, 1.0
        for number in range(self._settings.settings):
            share = (low + high) / 2
            runs = at_share(outcomes, share)
            if len(runs) < self._settings.repeats:
                reason = f"halfway between {low:.4g} and {high:.4g}"
                if self._settings.repeats > 1:
                    reason += f", run {len(runs) + 1} of {self._settings.repeats}"
                of = f"({number + 1} of {self._settings.settings})"
                return Decision(share, False, f"{reason} {of}")
            if goal.kept_by(runs):
                high = share
            else:
                low = share
        if high == 1:
            reason = f"every share that was tried came to less than {goal.bound:.6g}"
        else:
            reason = f"the least share of {self._settings.settings} that kept {goal.bound:.6g}"
        return Decision(high, True, reason)
