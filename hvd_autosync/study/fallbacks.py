"""Winners that the loss guard abandoned in a training; they are not used again.

The record of a fallback is stored with the study of the winner. The next run of the job uses the
next best strategy that was proven faster in that study. If there is none, the job is tuned again,
once, without the excluded strategies; after that it runs the default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace

from hvd_autosync.errors import SpaceError, StoreError
from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyRecord, TraceStore


def excluded_strategies(store: TraceStore, job_keys: Collection[str]) -> tuple[Strategy, ...]:
    """Return the strategies that the loss guard abandoned in trainings of a job.

    Args:
        store: The store of the studies.
        job_keys: Keys of the job's studies (``StudyRecord.job_key``).
    """
    studies = (study for key in sorted(job_keys) for study in store.studies(job_key=key))
    found = (fallback.strategy for study in studies for fallback in study.fallbacks)
    return tuple(dict.fromkeys(found))


def is_excluded(
    strategy: Strategy, excluded: Collection[Strategy], space: SearchSpace | None = None
) -> bool:
    """Return whether ``strategy`` is in ``excluded``, or has the same lossy part as one of them."""
    if strategy in excluded:
        return True
    return space is not None and not _parts(excluded, space).isdisjoint(_parts([strategy], space))


def _parts(strategies: Collection[Strategy], space: SearchSpace) -> set[Strategy]:
    """Return the lossy parts of the lossy ones among ``strategies`` that lie in the space."""
    found = set()
    for strategy in strategies:
        with contextlib.suppress(SpaceError):
            if not space.is_exact(strategy):
                found.add(space.lossy_part(strategy))
    return found


def without_excluded(study: StudyRecord, excluded: Collection[Strategy]) -> StudyRecord:
    """Return a finished study as if the excluded strategies had not been candidates.

    Args:
        study: The study.
        excluded: The excluded strategies (:func:`excluded_strategies`).

    Returns:
        The study itself if its winner was not abandoned. Else its winner is the next best strategy
        that was proven faster than the default, or the default.
    """
    conclusion = Conclusion.of(study)
    if study.winner is None or not is_excluded(study.winner, excluded, study.space):
        return study
    winner = Strategy() if study.space is None else study.space.default
    comparisons = () if conclusion is None else conclusion.comparisons
    kept = tuple(c for c in comparisons if not is_excluded(c.strategy, excluded, study.space))
    best = next((c for c in kept if c.proven), None)
    if best is not None:
        winner = best.strategy
    if conclusion is None:
        return replace(study, winner=winner)
    reason = "the loss guard has ended what won before"
    outcome = replace(conclusion, winner=winner, comparisons=kept, reason=reason).to_json()
    return replace(study, winner=winner, outcome={**(study.outcome or {}), **outcome})


def fallback_line(study: StudyRecord) -> str:
    """Describe the last fallback of a study's winner, for people; empty if there was none."""
    last = next(reversed(study.fallbacks), None)
    if last is None:
        return ""
    what = "its winner"
    if study.space is not None:
        with contextlib.suppress(SpaceError):
            what = study.space.describe(last.strategy)
    because = f", because {last.reason}" if last.reason else ""  # shared traces have none
    return f"{what} was ended by the loss guard at step {last.step} of a training{because}"


def known_fallback(store: TraceStore, study: StudyRecord) -> str:
    """Describe as :func:`fallback_line` what has ended the winner, or its lossy part.

    A training that is tuned live under the winner of launched trials keeps its lossy knobs, and
    reports a fallback to the study of these trials.
    """
    studies = [study]
    if judged_by := study.settings.get("judged_by"):
        with contextlib.suppress(StoreError):  # a file has one study
            studies.append(store.study(str(judged_by)))
    return next(filter(None, map(fallback_line, studies)), "")
