"""The binary search of Sync-Switch (Li et al., ICDCS 2021, section on the timing of the switch).

It bisects the shares: if runs at ``f`` keep the target, a smaller share is tried next, else a
larger one, until ``M`` shares have been tried with ``R`` runs each. The search ignores the duration
of the runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_autosync.recurring.outcomes import (
    NextShare,
    RecurringOutcome,
    SearchSettings,
    at_share,
    goal_of,
)


class BinarySearch:
    """Bisects the shares.

    Args:
        settings: The settings of the search.
    """

    def __init__(self, settings: SearchSettings) -> None:
        self._settings = settings

    def next_share(self, outcomes: Sequence[RecurringOutcome]) -> NextShare:
        """Return the next share, or the smallest that kept the target."""
        goal = goal_of(outcomes, self._settings)
        if isinstance(goal, NextShare):
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
                return NextShare(share, False, f"{reason} {of}")
            # Where the work has grown, the runs had less BSP than was planned.
            tried = max(each.share for each in runs)
            if goal.kept_by(runs):
                low, high = min(low, tried), tried
            else:
                low = max(low, tried)
        if high == 1:
            reason = f"all tried shares missed {goal.bound:.6g}"
        else:
            reason = f"the smallest of {self._settings.settings} shares that kept {goal.bound:.6g}"
        return NextShare(high, True, reason)
