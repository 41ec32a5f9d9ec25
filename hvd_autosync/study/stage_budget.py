"""Whose turn it is where lossy strategies may win: exploring, which finds fast ones, or judging.

What is fastest is mostly what loses most. So exploring stops before its trials are used up, the
best strategy is judged, and what that says of others like it steers the next trials::

    explore ... | default x 4 | judge | explore explore | judge | explore explore | ... | confirm
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_autosync.search_space import SearchSpace
from hvd_autosync.traces import TrialRecord

#: Share of the trials that are explored before anything is judged, and how many between two
#: judgements.
_AT_FIRST, _BETWEEN = 0.6, 2


def explores(kind: str) -> bool:
    """Whether a trial of this kind is not there to judge or to confirm; the default's is not."""
    return kind not in ("quality", "confirm")


def explored(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials that were not there to judge or to confirm, the default's among them."""
    return [trial for trial in trials if explores(trial.kind)]


def turn_to_explore(space: SearchSpace, trials: Sequence[TrialRecord], most: int) -> bool:
    """Whether exploring comes before judging now.

    Args:
        space: The space.
        trials: All trials so far, in order.
        most: How many may be explored in all.
    """
    if not space.has_lossy:
        return True
    judging = [trial for trial in trials if trial.kind == "quality"]
    if not judging:
        return len(explored(trials)) < max(_AT_FIRST * most, 1)
    judged = [t.number for t in judging if space.complete(t.strategy) != space.default]
    since = sum(trial.number > judged[-1] for trial in explored(trials)) if judged else _BETWEEN
    return since < _BETWEEN
