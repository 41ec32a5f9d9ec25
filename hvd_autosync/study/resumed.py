"""Speeds of a study that was resumed.

Other jobs, another network or another room temperature make all steps of a job slower or faster
than on the day before. So a study that has rested measures its default again before it goes on, and
step times from before count as if they had been measured now: in the ratio of both defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import pairwise

from hvd_autosync.search_space import Strategy, TrialResult
from hvd_autosync.traces import TrialRecord

#: After so long without a trial the default is measured again. Launches within it differ less.
_RESTS = timedelta(minutes=10)


def has_rested(trials: Sequence[TrialRecord], now: datetime | None = None) -> bool:
    """Return whether the last result of a study was told long ago.

    Args:
        trials: All of its trials.
        now: The moment, with a time zone; default: now.
    """
    # A repetition of the default that has failed has shown no speed.
    told = [
        datetime.fromisoformat(t.told_at)
        for t in trials
        if t.told_at is not None
        and not (t.kind == "default" and t.result is not None and t.result.step_time is None)
    ]
    now = datetime.now(timezone.utc) if now is None else now
    return bool(told) and now - max(told) > _RESTS


def repeated_defaults(trials: Sequence[TrialRecord]) -> set[int]:
    """Return the numbers of default trials that repeat a measured one, whatever they came to."""
    measured: set[Strategy] = set()
    found: set[int] = set()
    for trial in trials:
        if trial.kind == "default":
            if trial.strategy in measured:
                found.add(trial.number)
            if trial.result is not None and trial.result.step_time is not None:
                measured.add(trial.strategy)
    return found


def superseded_defaults(trials: Sequence[TrialRecord]) -> set[int]:
    """Return the numbers of default trials that were repeated later with the same strategy."""
    defaults = _measured_defaults(trials)
    return {one.number for one, after in pairwise(defaults) if one.strategy == after.strategy}


def at_one_speed(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials with all step times as of the last default trial.

    What was measured in the default's earlier trial, and until it was repeated, is multiplied by
    the ratio of the two. Applied twice it changes nothing more.

    Args:
        trials: Trials of one study, in order.
    """
    factors: dict[int, float] = {}
    defaults = _measured_defaults(trials)
    for one, after in pairwise(defaults):
        if one.strategy == after.strategy:
            factors[after.number] = _step_s(after) / _step_s(one)
    if not factors:
        return list(trials)
    found, factor = [], 1.0
    for trial in reversed(trials):
        found.append(trial if factor == 1.0 else replace(trial, result=_at(trial.result, factor)))
        factor *= factors.get(trial.number, 1.0)
    return found[::-1]


def _measured_defaults(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [t for t in trials if t.kind == "default" and t.result and t.result.step_time]


def _step_s(trial: TrialRecord) -> float:
    assert trial.result is not None and trial.result.step_time is not None, "it was measured"
    return trial.result.step_time.mean_s


def _at(result: TrialResult | None, factor: float) -> TrialResult | None:
    """Return a result of which all steps take ``factor`` times as long."""
    if result is None:
        return None
    ranks = tuple(
        replace(rank, step_s=tuple(s * factor for s in rank.step_s)) for rank in result.ranks
    )
    return replace(result, ranks=ranks)
