"""Forecast of the time that tuning will take, from its default trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_autosync.study.budget import Budget, quality_trial_s
from hvd_autosync.study.confirm import MAX_ROUNDS, MIN_ROUNDS
from hvd_autosync.study.noninferiority import LENGTHS, MOST_JUDGED, MOST_PAIRS
from hvd_autosync.study.quality import SEEDS
from hvd_autosync.study.quality_trial import FIRST_SEEDS
from hvd_autosync.study.stage_budget import explored
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import TrialRecord, default_result

#: Fewest and most strategies of a confirmation, the default included.
_FEWEST_CONTENDERS, _MOST_CONTENDERS = 2, 3
#: Most quality trials: those of the default with each number of steps, and those of candidates.
_MOST_JUDGING = len(LENGTHS) * len(SEEDS) + MOST_JUDGED * MOST_PAIRS
#: Quality trials until a first verdict at the first look: those of the default and a candidate.
_FEWEST_JUDGING = 2 * FIRST_SEEDS


@dataclass(frozen=True)
class Forecast:
    """The remaining trials and their time.

    Attributes:
        trial_s: Seconds of a trial.
        setup_s: Seconds of a trial until its first step has ended.
        trials: Largest number of remaining exploring trials.
        judging_s: Largest number of seconds of quality trials, each as slow as the default's.
        low_s: Seconds of the rest of the tuning with one early verdict, if any are needed, and the
            shortest confirmation.
        high_s: Seconds of the rest of the tuning with all quality trials and the longest
            confirmation.
        training_s: Expected seconds of the training.
        unjudged: Why no lossy strategy will be judged; empty if some may be, or there is none.
        trains: Whether the training follows; if so, Ctrl-C starts it at once.
    """

    trial_s: float
    setup_s: float
    trials: int
    judging_s: float
    low_s: float
    high_s: float
    training_s: float
    trains: bool
    unjudged: str = ""


def forecast(
    settings: StudySettings, trials: Sequence[TrialRecord], *, lossy: bool, trains: bool
) -> Forecast | None:
    """Return the forecast after the default trial; ``None`` if the default has no step time.

    Args:
        settings: The settings of the study.
        trials: The finished trials.
        lossy: Whether the space has lossy knobs.
        trains: Whether the training follows.
    """
    default, budget = default_result(trials), Budget(settings, trials)
    if default is None or default.step_time is None or not math.isfinite(default.total_s):
        return None
    each_s = budget.trial_s
    left = max(settings.trials - len(explored(trials)), 0)
    least_s = judging_s = 0.0
    begun = any(trial.kind == "quality" for trial in trials)  # of a study that is resumed
    unjudged = budget.why_not_judge(settings.quality_steps) if lossy and not begun else ""
    if lossy and not unjudged:
        shortest_s, longest_s = (
            quality_trial_s(default, settings, steps)
            for steps in (settings.quality_steps, max(LENGTHS) * settings.quality_steps)
        )
        allowed_s = 60 * settings.quality_minutes
        least_s = min(_FEWEST_JUDGING * shortest_s, allowed_s)
        judging_s = min(_MOST_JUDGING * longest_s, allowed_s)
    low_s, high_s = (
        min((left + confirming) * each_s + quality_s, max(budget.left_s, 0.0))
        for confirming, quality_s in (
            (MIN_ROUNDS * _FEWEST_CONTENDERS, least_s),
            (MAX_ROUNDS * _MOST_CONTENDERS, judging_s),
        )
    )
    return Forecast(
        each_s, default.setup_s, left, judging_s, low_s, high_s, budget.training_s, trains, unjudged
    )
