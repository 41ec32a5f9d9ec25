"""Recurring jobs: a search for the best share of the work under BSP, one share per run.

A search (:class:`BinarySearch` as in Sync-Switch, or :class:`BayesianSearch`) is a pure function of
the outcomes so far. It returns the share for the next run, or the final one. Torch is loaded
only when a Bayesian search predicts shares.
"""

from __future__ import annotations

from hvd_autosync.recurring.bayesian import BayesianSearch
from hvd_autosync.recurring.binary import BinarySearch
from hvd_autosync.recurring.outcomes import (
    Goal,
    NextShare,
    RecurringOutcome,
    Search,
    SearchSettings,
)

#: Name -> search.
SEARCHES: dict[str, type[BinarySearch] | type[BayesianSearch]] = {
    "bayesian": BayesianSearch,
    "binary": BinarySearch,
}

__all__ = [
    "SEARCHES",
    "BayesianSearch",
    "BinarySearch",
    "Goal",
    "NextShare",
    "RecurringOutcome",
    "Search",
    "SearchSettings",
]
