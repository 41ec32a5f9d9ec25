"""Forecast of the time that tuning will take, from its default trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_autosync.study.budget import Budget
from hvd_autosync.study.confirm import MAX_ROUNDS, MIN_ROUNDS
from hvd_autosync.study.noninferiority import MOST_JUDGED
from hvd_autosync.study.quality_trial import FIRST_SEEDS
from hvd_autosync.study.stage_budget import explored
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import TrialRecord, default_result

#: Fewest and most strategies of a confirmation, the default included.
_FEWEST_CONTENDERS, _MOST_CONTENDERS = 2, 3


@dataclass(frozen=True)
class Forecast:
    """The remaining trials and their time.

    Attributes:
        trial_s: Seconds of a trial.
        setup_s: Seconds of a trial until its first step has ended.
        trials: Largest number of remaining exploring trials.
        judging_s: Largest number of seconds of quality trials.
        low_s: Seconds of the rest of the tuning with the shortest confirmation.
        high_s: Seconds of the rest of the tuning with the longest confirmation.
        training_s: Expected seconds of the training.
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
    judging_s = 0.0
    if lossy:
        steps_s = settings.quality_steps * default.step_time.mean_s
        most = FIRST_SEEDS * (1 + MOST_JUDGED)  # inconclusive pairs need more seeds
        judging_s = min(most * (default.setup_s + steps_s), 60 * settings.quality_minutes)
    low_s, high_s = (
        min((left + rounds * contenders) * each_s + judging_s, max(budget.left_s, 0.0))
        for rounds, contenders in ((MIN_ROUNDS, _FEWEST_CONTENDERS), (MAX_ROUNDS, _MOST_CONTENDERS))
    )
    return Forecast(
        each_s, default.setup_s, left, judging_s, low_s, high_s, budget.training_s, trains
    )
