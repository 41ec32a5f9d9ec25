"""The stage budget: whether to explore or to judge next, if the space has lossy knobs.

The fastest strategies are mostly the most lossy ones. So exploring pauses before its trials are
used up, the best strategy is judged, and its verdict guides the next trials through the quality
constraint::

    explore ... | default x 4 | judge | explore explore | judge | explore explore | ... | confirm
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_autosync.search_space import SearchSpace
from hvd_autosync.study.resumed import repeated_defaults
from hvd_autosync.traces import TrialRecord

#: Share of the exploring trials that run before the first verdict, and their number between two
#: verdicts.
_AT_FIRST, _BETWEEN = 0.6, 2


def explores(kind: str) -> bool:
    """Return whether trials of this kind explore: neither judge nor confirm (the default's do)."""
    return kind not in ("quality", "confirm")


def explored(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the exploring trials, the first of the default included.

    Its repetitions after a rest explore nothing.
    """
    repeated = repeated_defaults(trials)
    return [trial for trial in trials if explores(trial.kind) and trial.number not in repeated]


def turn_to_explore(space: SearchSpace, trials: Sequence[TrialRecord], most: int) -> bool:
    """Return whether to explore before judging now.

    Args:
        space: The space.
        trials: All trials so far, in order.
        most: Largest number of exploring trials.
    """
    if not space.has_lossy:
        return True
    judging = [trial for trial in trials if trial.kind == "quality"]
    if not judging:
        return len(explored(trials)) < max(_AT_FIRST * most, 1)
    judged = [t.number for t in judging if space.complete(t.strategy) != space.default]
    since = sum(trial.number > judged[-1] for trial in explored(trials)) if judged else _BETWEEN
    return since < _BETWEEN
