"""The speed-up of each trial, the same wherever trials are listed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space import SearchSpace, StepTime, Strategy
from hvd_autosync.traces.records import StudyRecord, TrialRecord


def is_default(space: SearchSpace | None, kind: str, strategy: Strategy) -> bool:
    """Return whether a trial measures the default; ``kind`` is the trial's kind."""
    if space is None:
        return kind == "default"
    if space.excludes(strategy):
        return False
    if kind == "default":
        return True
    try:
        return space.complete(strategy) == space.default
    except SpaceError:  # an imported trial may lie outside of the space
        return False


class Speedups:
    """Speed-ups of the trials of one study, taken in order.

    A trial is compared with the last default before it: speeds of a machine differ from hour to
    hour. In every second round of the confirmation, which ends with the default, this is the
    default of the round before; the conclusion compares within rounds.
    """

    def __init__(self) -> None:
        self._default_s = math.nan

    def take(self, time: StepTime | None, *, default: bool) -> float:
        """Return the speed-up of the next trial; NaN if unknown.

        Args:
            time: Its step time; ``None`` if it has none.
            default: Whether it measures the default.
        """
        if time is None:
            return math.nan
        if default:
            self._default_s = time.mean_s
        return self._default_s / time.mean_s


def speedups(study: StudyRecord, trials: Sequence[TrialRecord]) -> list[float]:
    """Return the speed-up of each trial over the last default before it; NaN if unknown.

    Args:
        study: The study.
        trials: All of its trials, in order.
    """
    compared = Speedups()
    return [
        compared.take(trial.step_time, default=is_default(study.space, trial.kind, trial.strategy))
        for trial in trials
    ]
