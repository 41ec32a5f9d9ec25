from __future__ import annotations

from typing import Any

import pytest

from hvd_autosync.reporting.explain_trials import lost_strategies
from hvd_autosync.reporting.runner_ups import confirmed_step_s, launch_spread, runner_ups
from hvd_autosync.search_space import TrialStatus, build_space
from hvd_autosync.study.confirm import Comparison
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyStatus

WINNER = {"buckets": 8, "cycle_time_ms": 5.0, "controller": "mpi"}


def reasons(author: Any) -> dict[str, str]:
    """Strategy in words -> why it lost, in order."""
    conclusion = author.study.conclusion
    found = runner_ups(author.space, author.study.history, conclusion)
    return {author.space.describe(each.strategy): each.why for each in found}


def test_each_strategy_lost_for_its_own_reason(author: Any) -> None:
    author.explore()
    author.trial("model", {"cycle_time_ms": 30.0}, mean_s=0.06)
    author.trial("model", {"cycle_time_ms": 40.0}, mean_s=0.0379)
    author.confirm()
    why = reasons(author)
    assert why["cycle_time_ms=30 ms"] == "slower than the default"
    assert why["buckets=4"] == "slower than the winner"
    assert why["cycle_time_ms=0.2 ms"].startswith("cut short after 40 measured steps")
    assert why["cycle_time_ms=40 ms"].startswith("within the noise of one trial of the winner")


def finish(author: Any, winner: Any, reason: str, *comparisons: Comparison) -> None:
    conclusion = Conclusion(winner, reason, "all 20 trials were used", 0.05, comparisons)
    author.store.finish(author.study_id, StudyStatus.FINISHED, conclusion.to_json(), winner)


def test_a_candidate_that_failed_when_measured_again_says_so(author: Any) -> None:
    author.explore()
    candidate = {"cycle_time_ms": 40.0}
    author.trial("model", candidate, mean_s=0.0379)
    reason = "rank 1 exited with status 3"
    crash = {"ranks": (), "status": TrialStatus.CRASHED, "reason": f"{reason}\nTraceback"}
    author.trial("confirm", candidate, **crash)
    author.confirm()
    assert reasons(author)["cycle_time_ms=40 ms"] == f"failed when measured again: {reason}"


def test_without_a_confirmation_it_says_why_there_was_none(author: Any) -> None:
    author.explore()
    finish(author, author.space.default, "the 5 minutes of the tuning were used up")
    why = "not confirmed: the 5 minutes of the tuning were used up"
    assert reasons(author)["buckets=4"] == why


@pytest.mark.parametrize("gain", [False, True])
def test_a_lossy_strategy_without_a_verdict_was_not_judged(author: Any, gain: bool) -> None:
    task = author.task
    author.space = build_space(task.model, task.resources, allow=("codec",))
    author.store.describe_task(author.study_id, task, author.space)
    author.trial("default", {})
    author.trial("model", {"large_codec": "fp16"}, mean_s=0.02)
    author.trial("model", {"buckets": 8}, mean_s=0.04)
    exact = author.space.complete({"buckets": 8})
    won = [Comparison(exact, 1.25, 1.2, 1.3, 3)] if gain else []
    finish(author, exact if gain else author.space.default, "there was no time left", *won)
    assert reasons(author)["large_codec=fp16"] == "its losses were not judged"


def test_the_default_the_winner_and_failures_are_no_runner_ups(author: Any) -> None:
    author.explore()
    author.confirm()
    assert len(reasons(author)) == 3


def test_runner_ups_come_best_first_after_those_that_were_confirmed(author: Any) -> None:
    author.explore()
    author.confirm(factor=1.35)
    names = list(reasons(author))
    assert names[0].startswith("controller=mpi")
    assert names[1:] == ["buckets=4", "cycle_time_ms=20 ms", "cycle_time_ms=0.2 ms"]


def test_intervals_allow_for_launches_that_differ(author: Any) -> None:
    author.trial("default", {}, mean_s=0.05)
    author.trial("sobol", {"cycle_time_ms": 4.0}, mean_s=0.045)
    author.confirm()
    steady = runner_ups(author.space, author.study.history, author.study.conclusion)[0]
    author.record = author.store.create_study(
        job_key="job", command=(), settings=author.record.settings, versions={}
    )
    author.study_id = author.record.study_id
    author.store.describe_task(author.study_id, author.task, author.space)
    author.trial("default", {}, mean_s=0.05)
    author.trial("sobol", {"cycle_time_ms": 4.0}, mean_s=0.045)
    author.trial("sobol", {"cycle_time_ms": 4.0}, mean_s=0.055)
    author.confirm()
    shaky = runner_ups(author.space, author.study.history, author.study.conclusion)[0]
    assert shaky.high - shaky.low > 2 * (steady.high - steady.low)


def test_the_spread_of_launches_is_the_pooled_standard_deviation(author: Any) -> None:
    for mean_s in (0.05, 0.05 * 1.1):
        author.trial("default", {}, mean_s=mean_s)
    author.trial("sobol", {"cycle_time_ms": 4.0})
    spread = launch_spread(author.space, author.study.history)
    assert spread == pytest.approx(0.0953 / 2**0.5, rel=0.05)


def test_without_repetition_no_spread_is_known(author: Any) -> None:
    author.explore()
    assert launch_spread(author.space, author.study.history) == 0.0


def test_a_confirmed_runner_up_has_its_confirmed_step_time(author: Any) -> None:
    author.trial("default", {})
    author.trial("model", WINNER, mean_s=0.03)  # luck
    author.confirm(factor=1.35)
    (lost,) = runner_ups(author.space, author.study.history, author.study.conclusion)
    confirmed = confirmed_step_s(author.space, author.study.history)
    assert lost.step_s == confirmed[lost.strategy] == pytest.approx(0.0513, rel=0.01)
    assert lost.speedup == pytest.approx(0.975, abs=0.01)


def test_five_are_shown_and_the_rest_counted(author: Any) -> None:
    author.explore()
    for number in range(4):
        author.trial("model", {"cycle_time_ms": 30.0 + number}, status=TrialStatus.ENDED_EARLY)
    author.confirm()
    study = author.study
    shown = list(lost_strategies(author.space, study.history, study.conclusion, ["here"]))
    assert shown[5 * 2 :] == ["and 2 more", "here"]


def test_a_study_of_the_default_alone_has_no_runner_ups(author: Any) -> None:
    author.trial("default", {})
    author.confirm()
    assert reasons(author) == {}


def test_after_a_rest_all_are_compared_at_the_speed_of_the_last_default(author: Any) -> None:
    author.trial("default", {}, mean_s=0.05)
    author.trial("sobol", {"cycle_time_ms": 20.0}, mean_s=0.048)
    author.trial("default", {}, mean_s=0.1)  # on a day that is half as fast
    author.trial("sobol", {"buckets": 4}, mean_s=0.08)
    finish(author, author.space.default, "there was no time left")
    found = runner_ups(author.space, author.study.history, author.study.conclusion)
    slower_day, faster_day = found
    assert author.space.describe(slower_day.strategy) == "buckets=4"
    assert slower_day.speedup == pytest.approx(1.25, rel=0.02)
    assert faster_day.step_s == pytest.approx(0.096, rel=0.02)
    assert faster_day.speedup == pytest.approx(1.04, rel=0.02)
    assert all(each.high - each.low < 0.1 for each in found), "the days are no spread of launches"
