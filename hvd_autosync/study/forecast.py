"""How long a tuning will take, as its default trial lets expect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_autosync.study.budget import Budget
from hvd_autosync.study.confirm import MAX_ROUNDS, MIN_ROUNDS
from hvd_autosync.study.noninferiority import MOST_JUDGED
from hvd_autosync.study.quality import FIRST_SEEDS
from hvd_autosync.study.stage_budget import explored
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import TrialRecord, default_result

#: Contenders of a confirmation, the default among them: fewest and most.
_FEWEST_CONTENDERS, _MOST_CONTENDERS = 2, 3


@dataclass(frozen=True)
class Forecast:
    """What may still be done, and how long that takes.

    Attributes:
        trial_s: Seconds of a trial.
        setup_s: Seconds of it until its first step has ended.
        trials: Most trials that may still explore.
        judging_s: Most seconds of trials that judge lossy strategies.
        low_s: Seconds with the shortest confirmation.
        high_s: Seconds with the longest one.
        training_s: Seconds that the training is expected to take.
        trains: Whether the training follows, which Ctrl-C begins at once.
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
    """What is expected of a study whose default was measured; ``None`` where no time is known.

    Args:
        settings: Of the study.
        trials: Those that have ended.
        lossy: Whether its space has lossy knobs.
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
        most = FIRST_SEEDS * (1 + MOST_JUDGED)  # more seeds are needed where these do not tell
        judging_s = min(most * (default.setup_s + steps_s), 60 * settings.quality_minutes)
    low_s, high_s = (
        min((left + rounds * contenders) * each_s + judging_s, budget.left_s)
        for rounds, contenders in ((MIN_ROUNDS, _FEWEST_CONTENDERS), (MAX_ROUNDS, _MOST_CONTENDERS))
    )
    return Forecast(
        each_s, default.setup_s, left, judging_s, low_s, high_s, budget.training_s, trains
    )
