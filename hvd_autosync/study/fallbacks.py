"""Winners that the loss guard has ended in a training: they are not used again.

The record of a fall-back is kept with the study whose winner it was. The next run of the job takes
the next best strategy that was proven to be faster in that study; where there is none, it searches
again, once, without the strategies that were left; after that it runs the default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.study.confirm import MIN_ROUNDS
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyRecord, TraceStore


def left_strategies(store: TraceStore, job_key: str) -> tuple[Strategy, ...]:
    """The strategies that trainings of a job were ended under by the loss guard.

    Args:
        store: Where the studies are.
        job_key: Of the job (``StudyRecord.job_key``).
    """
    found = (f.strategy for s in store.studies() if s.job_key == job_key for f in s.fallbacks)
    return tuple(dict.fromkeys(found))


def is_left(
    strategy: Strategy, left: Collection[Strategy], space: SearchSpace | None = None
) -> bool:
    """Whether ``strategy`` is one of those that were left, or trains the same model in a space."""
    if strategy in left:
        return True
    return space is not None and not _parts(left, space).isdisjoint(_parts([strategy], space))


def _parts(strategies: Collection[Strategy], space: SearchSpace) -> set[Strategy]:
    """What of each decides what is trained; without those outside of the space."""
    found = set()
    for strategy in strategies:
        with contextlib.suppress(SpaceError):
            if not space.is_exact(strategy):
                found.add(space.lossy_part(strategy))
    return found


def without_left(study: StudyRecord, left: Collection[Strategy]) -> StudyRecord:
    """A finished study as if the strategies that were left had not been candidates.

    Args:
        study: The study.
        left: As of :func:`left_strategies`.

    Returns:
        The study itself where its winner was not left; else with the next best strategy that was
        proven to be faster than the default, or with the default as its winner.
    """
    conclusion = Conclusion.of(study)
    if study.winner is None or not is_left(study.winner, left, study.space):
        return study
    winner = Strategy() if study.space is None else study.space.default
    comparisons = () if conclusion is None else conclusion.comparisons
    kept = tuple(c for c in comparisons if not is_left(c.strategy, left, study.space))
    best = next((c for c in kept if c.proven and c.rounds >= MIN_ROUNDS), None)
    if best is not None:
        winner = best.strategy
    if conclusion is None:
        return replace(study, winner=winner)
    reason = "the loss guard has ended what won before"
    outcome = replace(conclusion, winner=winner, comparisons=kept, reason=reason).to_json()
    return replace(study, winner=winner, outcome={**(study.outcome or {}), **outcome})


def fallback_line(study: StudyRecord) -> str:
    """What the last training under a study's winner came to, for people; empty if nothing did."""
    last = next(reversed(study.fallbacks), None)
    if last is None:
        return ""
    what = "its winner"
    if study.space is not None:
        with contextlib.suppress(SpaceError):
            what = study.space.describe(last.strategy)
    because = f", because {last.reason}" if last.reason else ""  # shared traces have none
    return f"{what} was ended by the loss guard at step {last.step} of a training{because}"
