"""What a live trial measures where ranks have different numbers of batches."""

from __future__ import annotations

from time import perf_counter

import pytest

from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.live.live_trial import LiveTrial
from hvd_autosync.search_space import Strategy, TrialResult, TrialSpec, TrialStatus

WARMUP, MEASURED = 3, 12
#: Steps of an epoch that rank 1 lacks.
LACKING = 9


def make_steps(trial: LiveTrial, count: int, step_s: float = 0.01) -> None:
    for _ in range(count):
        trial.recorder.step_s.append(step_s)
        trial.recorder.blocked_s.append(0.0)


def body() -> TrialResult | None:
    spec = TrialSpec("t", Strategy(), warmup_steps=WARMUP, measured_steps=MEASURED)
    trial = LiveTrial(spec, perf_counter(), float("inf"))
    make_steps(trial, WARMUP + 3)
    waited = LACKING * rank()
    make_steps(trial, LACKING - waited)
    trial.all_joined(waited, LACKING)
    assert trial.steps == WARMUP + MEASURED
    assert not trial.over, "three of its steps were made by all ranks"
    make_steps(trial, MEASURED - 3)
    assert trial.over
    return trial.result(TrialStatus.COMPLETED, "")


def test_steps_that_some_ranks_have_not_made_are_never_measured() -> None:
    """Though they are most of those that a trial should have."""
    result, _ = ThreadRanks(2, seed=1).run(body)
    assert result is not None and result.step_time is not None
    for report in result.ranks:
        assert list(report.step_s) == [0.01] * (WARMUP + MEASURED)
    assert result.step_time.mean_s == pytest.approx(0.01)


def test_a_trial_that_begins_again_counts_its_steps_from_there() -> None:
    """Ranks had lacked steps of the beginning before, and one in which profiling begins."""
    spec = TrialSpec("t", Strategy(), warmup_steps=10, measured_steps=MEASURED, profile=True)
    trial = LiveTrial(spec, perf_counter(), float("inf"))
    make_steps(trial, 4)
    assert not trial.all_joined(0, 2)
    make_steps(trial, 2)
    assert trial.all_joined(0, 2)
    assert trial.steps == 0
    make_steps(trial, 10 + MEASURED)
    assert trial.over and len(trial.measured) == MEASURED


@pytest.mark.parametrize("slow", [0, 4])
def test_steps_in_which_a_strategy_settles_are_not_measured(slow: int) -> None:
    def body() -> TrialResult | None:
        spec = TrialSpec("t", Strategy(), warmup_steps=WARMUP, measured_steps=MEASURED)
        trial = LiveTrial(spec, perf_counter(), float("inf"))
        make_steps(trial, WARMUP + slow, step_s=0.02)
        make_steps(trial, MEASURED - slow)
        assert trial.over and list(trial.measured) == [0.01] * (MEASURED - slow)
        return trial.result(TrialStatus.COMPLETED, "")

    result, _ = ThreadRanks(2, seed=1).run(body)
    assert result is not None and result.step_time is not None
    assert result.warmup_steps == WARMUP + slow
    assert result.step_time.mean_s == pytest.approx(0.01)
