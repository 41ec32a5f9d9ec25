"""The time that is left of a study."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hvd_autosync.search_space import RankReport, Strategy, TrialResult, TrialStatus
from hvd_autosync.study.budget import Budget
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import TrialRecord


def test_runs_whose_results_were_discarded_use_the_minutes_but_are_not_expected_again() -> None:
    settings = StudySettings(minutes=1.0, quality_minutes=0.5)
    result = TrialResult(TrialStatus.COMPLETED, total_s=10.0)
    trial = TrialRecord("study", 0, "sobol", Strategy(), "", "", {"ask_s": 1.0}, result)
    assert Budget(settings, [trial]).left_s == 49.0
    twice = replace(trial, result=replace(result, discarded_s=20.0))
    budget = Budget(settings, [twice])
    assert (budget.left_s, budget.trial_s) == (29.0, 11.0)
    quality = replace(twice, kind="quality")
    why = Budget(settings, [quality]).why_not_judge(40)
    assert why == "the limit of 0.5 minutes of quality trials is reached"


@pytest.mark.parametrize(("trials", "said"), [(2, ""), (3, "3 more trials of 100 s")])
def test_a_look_whose_pairs_have_no_time_is_not_begun(trials: int, said: str) -> None:
    """Before the first look, each trial is begun for which there is time."""
    result = TrialResult(TrialStatus.COMPLETED, total_s=100.0)
    quality = TrialRecord("study", 0, "quality", Strategy(), "", "", {}, result)
    for count, found in ((8, said), (7, "")):
        settings = StudySettings(quality_minutes=(count + 2.5) * 100 / 60)
        why = Budget(settings, [quality] * count).why_not_judge(200, trials)
        assert why.endswith(found) and bool(why) is bool(found)


def test_judging_takes_until_the_next_look() -> None:
    settings = StudySettings(steps=40)
    ranks = (RankReport(0, "a", (0.1,) * 50),)
    default = TrialResult(TrialStatus.COMPLETED, ranks=ranks, warmup_steps=10, total_s=10.0)
    trials = [TrialRecord("study", 0, "default", Strategy(), "", "", {}, default)]
    trials += [replace(trials[0], number=n, kind="quality") for n in range(1, 9)]
    for known, look, expected in ((1, 4, 8), (9, 1, 1), (9, 4, 4)):
        found = Budget(settings, trials[:known]).judging_s(200, look)
        assert found == pytest.approx(expected * 26.0)


def test_quality_trials_have_the_time_that_is_left_of_both_limits() -> None:
    settings = StudySettings(minutes=1.0, quality_minutes=0.5)
    result = TrialResult(TrialStatus.COMPLETED, total_s=20.0)
    quality = TrialRecord("study", 0, "quality", Strategy(), "", "", {}, result)
    other = replace(quality, kind="sobol")
    budget = Budget(settings, [quality, other])
    assert (budget.left_for("quality"), budget.left_for("confirm")) == (10.0, 20.0)
    assert Budget(settings, [quality, other, other]).left_for("quality") == 0.0
    unlimited = Budget(replace(settings, minutes=None), [quality])
    assert (unlimited.left_for("quality"), unlimited.left_for("sobol")) == (10.0, math.inf)


def test_a_confirmation_is_not_charged_with_the_search_for_strategies() -> None:
    """None is searched for: its trials repeat what was tried."""
    settings = StudySettings(minutes=10.0, expected_hours=300 / 3600)
    result = TrialResult(TrialStatus.COMPLETED, total_s=10.0)
    trial = TrialRecord("study", 0, "sobol", Strategy(), "", "", {"ask_s": 5.0}, result)
    budget = Budget(settings, [trial])
    assert budget.confirming_s() == 60.0 and budget.trial_s == budget.cost_s == 15.0
    assert not budget.why_not_confirm(2, saving=0.2)
    assert "costs 60 s" in budget.why_not_confirm(2, saving=0.19)
    assert not budget.why_not_go_on(2, saving=0.07)
    assert "costs 20 s" in budget.why_not_go_on(2, saving=0.06)


def test_a_confirmation_of_more_steps_takes_longer() -> None:
    """As where a round of local steps is longer than other trials."""
    settings = StudySettings(minutes=10.0, steps=40)
    ranks = (RankReport(0, "a", (0.1,) * 50),)
    default = TrialResult(TrialStatus.COMPLETED, ranks=ranks, warmup_steps=10, total_s=10.0)
    trial = TrialRecord("study", 0, "default", Strategy(), "", "", {}, default)
    other = replace(
        trial, number=1, kind="sobol", result=TrialResult(TrialStatus.COMPLETED, total_s=10.0)
    )
    budget = Budget(settings, [trial, other])
    assert budget.confirming_s(2) == budget.confirming_s(2, 40) == 60.0
    assert budget.confirming_s(2, 96) == pytest.approx(60.0 + 6 * 5.6)
