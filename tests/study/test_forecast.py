"""What is said of the duration of a tuning after its default trial."""

from __future__ import annotations

import pytest

from hvd_autosync.search_space import RankReport, Strategy, TrialResult, TrialStatus
from hvd_autosync.study.forecast import Forecast, forecast
from hvd_autosync.study.noninferiority import MOST_JUDGED, MOST_PAIRS
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import TrialRecord

#: Set-up and end of a trial, and a step, seconds.
SETUP_S, STEP_S = 5.0, 0.1


def expected(*, lossy: bool, several: bool = False, **settings: float) -> Forecast:
    rank = RankReport(0, "a", (STEP_S,) * 50, several_losses=several)
    total_s = SETUP_S + 50 * STEP_S
    result = TrialResult(
        TrialStatus.COMPLETED, ranks=(rank,), warmup_steps=10, setup_s=4.0, total_s=total_s
    )
    default = TrialRecord("study", 0, "default", Strategy(), "", "", {}, result)
    found = forecast(StudySettings(**settings), [default], lossy=lossy, trains=True)
    assert found is not None
    return found


def test_the_quality_trials_are_all_that_there_may_be() -> None:
    """Pairs that are inconclusive need more seeds, and losses that do not fall more steps."""
    found = expected(lossy=True, quality_minutes=1e6)
    shortest_s = SETUP_S + 210 * STEP_S
    assert found.judging_s >= MOST_PAIRS * (1 + MOST_JUDGED) * shortest_s
    assert found.judging_s >= 4 * (SETUP_S + 1610 * STEP_S)
    # A verdict at the first look, of four pairs, may be the only one.
    assert found.low_s == pytest.approx((19 + 6) * found.trial_s + 8 * shortest_s)
    assert found.high_s == pytest.approx((19 + 48) * found.trial_s + found.judging_s)


def test_the_quality_trials_take_no_longer_than_they_may() -> None:
    assert expected(lossy=True, quality_minutes=30.0).judging_s == 30 * 60
    found = expected(lossy=True, quality_minutes=4.0)
    assert found.judging_s == 240 and not found.unjudged
    short = expected(lossy=True, quality_minutes=1.0)
    assert short.judging_s == 0 and "first verdict" in short.unjudged
    assert short.low_s == pytest.approx((19 + 6) * found.trial_s)


def test_without_lossy_knobs_nothing_is_judged() -> None:
    found = expected(lossy=False, several=True)
    assert found.judging_s == 0.0 and not found.unjudged
    assert found.low_s == pytest.approx((19 + 6) * found.trial_s)


def test_a_job_with_several_losses_is_told_at_once_that_nothing_is_judged() -> None:
    found = expected(lossy=True, several=True)
    assert found.judging_s == 0.0 and "call hvd_autosync.report(loss)" in found.unjudged
