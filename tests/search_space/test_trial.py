"""Trials as values: specifications, step times, results."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from hvd_autosync.search_space import (
    ModelProfile,
    RankReport,
    StepTime,
    Strategy,
    TrialResult,
    TrialSpec,
    TrialStatus,
)


@pytest.mark.parametrize("threshold", [math.inf, 0.25])
def test_spec_round_trip(threshold: float) -> None:
    spec = TrialSpec("t", Strategy({"cycle_time_ms": 0.5}), 3, 7, True, threshold)
    assert TrialSpec.from_json(spec.to_json()) == spec


def test_outliers_do_not_move_the_step_time() -> None:
    steady = StepTime.from_steps([0.1] * 40)
    disturbed = StepTime.from_steps([0.1] * 38 + [5.0, 9.0])
    assert math.isclose(steady.mean_s, 0.1) and math.isclose(disturbed.mean_s, 0.1)


def test_the_standard_error_covers_the_truth() -> None:
    rng = np.random.default_rng(0)
    estimates = [StepTime.from_steps(rng.normal(1.0, 0.1, 40)) for _ in range(400)]
    covered = [abs(e.mean_s - 1.0) < 2 * e.standard_error_s for e in estimates]
    assert np.mean(covered) > 0.9


def test_steps_that_resemble_their_neighbours_count_for_less() -> None:
    rng = np.random.default_rng(0)
    drifting = 1.0 + 0.1 * np.repeat(rng.normal(size=8), 5)
    shuffled = rng.permutation(drifting)
    together, apart = StepTime.from_steps(drifting), StepTime.from_steps(shuffled)
    assert together.standard_error_s > 1.5 * apart.standard_error_s


def result(steps: int, status: TrialStatus = TrialStatus.COMPLETED) -> TrialResult:
    reports = tuple(
        RankReport(rank, "a", (9.0,) * 2 + (0.1 + rank / 10,) * steps, (0.05,) * (steps + 2))
        for rank in range(2)
    )
    return TrialResult(status, ranks=reports, warmup_steps=2)


def test_warm_up_is_left_out_and_ranks_are_averaged() -> None:
    time = result(10).step_time
    assert time is not None and math.isclose(time.mean_s, 0.15) and time.steps == 10
    assert math.isclose(result(10).blocked_share, 0.05 * 20 / 3.0)


def test_few_steps_or_a_failure_give_no_step_time() -> None:
    assert result(4).step_time is None
    assert result(10, TrialStatus.CRASHED).step_time is None
    assert result(10, TrialStatus.ENDED_EARLY).step_time is not None


@pytest.mark.parametrize("step_s", [0.0, -0.1, 1e308])
def test_what_is_no_duration_is_no_step_time(step_s: float) -> None:
    """As in an imported trace; the mean of the last is infinite."""
    ranks = tuple(RankReport(rank, "a", (step_s,) * 20) for rank in range(2))
    assert TrialResult(TrialStatus.COMPLETED, ranks=ranks).step_time is None


def test_result_round_trip_survives_strict_json() -> None:
    report = RankReport(0, "a", (0.1,), (0.0,), (1.5, math.nan), 7)
    before = TrialResult(
        TrialStatus.HUNG,
        "why",
        (report,),
        1,
        math.nan,
        2.0,
        137,
        "tail",
        ModelProfile(),
        ("compression",),
        "cpu",
    )
    text = json.dumps(before.to_json(), allow_nan=False)
    assert repr(TrialResult.from_json(json.loads(text))) == repr(before)


def test_the_time_of_a_step_is_the_mean_of_its_round() -> None:
    """Every fourth step waits for the average; what follows the last whole round is left out."""
    steps = (9.0, 1.0, 1.0, 1.0, *(0.1, 0.1, 0.1, 0.5) * 6, 0.1, 0.1)
    report = RankReport(0, "a", steps)
    result = TrialResult(TrialStatus.COMPLETED, ranks=(report,), warmup_steps=4, round_steps=4)
    assert result.step_time is not None
    assert result.step_time.mean_s == pytest.approx(0.2) and result.step_time.steps == 6
    assert TrialResult.from_json(result.to_json()) == result
    spec = TrialSpec("t", Strategy({"local_steps": 4}))
    assert spec.round_steps == 4 and TrialSpec("t", Strategy()).round_steps == 1


def test_steps_unlike_the_others_are_in_no_step_time() -> None:
    """Such as an evaluation on any rank: some trials meet one, and others do not."""
    steps = (9.0, *(0.1, 0.5) * 3, 7.0, *(0.1, 0.5) * 5)
    ranks = [RankReport(0, "a", steps, steps), RankReport(1, "a", steps, steps, untypical=(7,))]
    result = TrialResult(TrialStatus.COMPLETED, ranks=tuple(ranks), warmup_steps=1, round_steps=2)
    assert result.step_time is not None
    assert result.step_time.mean_s == pytest.approx(0.3) and result.step_time.steps == 8
    assert result.blocked_share == pytest.approx(1.0)
    assert TrialResult.from_json(result.to_json()) == result


@pytest.mark.parametrize(
    ("untypical", "length", "left"), [(5, 1, 5), (6, 1, 10), (1, 2, 5), (2, 1, 8)]
)
def test_steps_unlike_the_others_stay_if_they_are_the_most_or_too_few_rounds_are_left(
    untypical: int, length: int, left: int
) -> None:
    unlike = tuple(range(1, 11))[-untypical:]
    report = RankReport(0, "a", (0.1,) * 11, untypical=unlike)
    result = TrialResult(TrialStatus.COMPLETED, ranks=(report,), warmup_steps=1, round_steps=length)
    assert len(result.measured_durations()) == left


def test_the_parts_of_a_trials_time_are_all_of_it() -> None:
    ranks = (RankReport(0, "a", (1.0, 2.0, 3.0, 3.0)), RankReport(1, "a", (1.0, 2.0, 5.0, 5.0)))
    result = TrialResult(
        TrialStatus.COMPLETED, ranks=ranks, warmup_steps=2, setup_s=6.0, total_s=20.0, launch_s=4.0
    )
    parts = {"launch": 4.0, "set-up": 2.0, "warm-up": 2.0, "measured steps": 8.0, "end": 4.0}
    assert result.parts_s() == parts
    assert TrialResult.from_json(result.to_json()).parts_s() == parts
    before = replace(result, launch_s=math.nan)  # as traces of earlier versions have it
    assert "launch_s" not in before.to_json()
    rest = {name: seconds for name, seconds in parts.items() if name != "launch"}
    assert before.parts_s() == {**rest, "set-up": 6.0}
    steps = {"warm-up": 2.0, "measured steps": 8.0}
    assert replace(before, setup_s=math.nan).parts_s() == steps, "it may have been the set-up"
