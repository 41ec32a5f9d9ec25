"""Recorded trials, played again."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_autosync.errors import StudyError
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.replay import ReplayRunner
from hvd_autosync.search_space import (
    RankReport,
    SearchSpace,
    Strategy,
    TrialResult,
    TrialSpec,
    TrialStatus,
)
from hvd_autosync.search_space.knobs import categorical_knob, float_knob
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.traces import TraceStore, export_study, read_trials

SPACE = SearchSpace(
    (
        float_knob("pause", 0.1, 10.0, 1.0, help=""),
        categorical_knob("coding", ("none", "fp16"), "none", help="", exact=False),
    )
)


@pytest.fixture
def store() -> TraceStore:
    return TraceStore("sqlite://")


@pytest.fixture
def study(store: TraceStore) -> AskTellStudy:
    """The default twice, 11 and 12 ms; cycles of 5 ms, 15 ms; those with fp16, 10 ms."""
    study = AskTellStudy.create(SPACE, store=store)
    slow, coded = {"pause": 5.0}, {"pause": 5.0, "coding": "fp16"}
    for strategy, step_ms in (({}, 11), (slow, 15), (coded, 10), ({}, 12)):
        number = store.ask(study.study_id, Strategy(strategy), "sobol", {})
        report = RankReport(0, "", (step_ms / 1e3,) * 10)
        result = TrialResult(TrialStatus.COMPLETED, ranks=(report,))
        store.tell(study.study_id, number, result)
    return study


def played(runner: ReplayRunner, strategy: Strategy) -> float:
    result = runner.run(TrialSpec("trial", strategy), Limits(), lambda _: None)
    assert result.step_time is not None
    return 1e3 * result.step_time.mean_s


def test_the_same_strategy_answers_and_repetitions_in_turn(study: AskTellStudy) -> None:
    runner = ReplayRunner(study.record, study.history)
    for step_ms in (11, 12, 11):
        assert played(runner, Strategy()) == pytest.approx(step_ms)
        assert runner.distance == 0


def test_a_job_that_restrictions_exclude_stands_for_no_strategy(store: TraceStore) -> None:
    """Also not for their default, which its own would be otherwise."""
    space = SearchSpace(SPACE.knobs, holds_job=False)
    study = AskTellStudy.create(space, store=store)
    for strategy, step_ms in ((Strategy(), 11), (space.default, 15)):
        number = store.ask(study.study_id, strategy, "sobol", {})
        report = RankReport(0, "", (step_ms / 1e3,) * 10)
        store.tell(study.study_id, number, TrialResult(TrialStatus.COMPLETED, ranks=(report,)))
    runner = ReplayRunner(study.record, study.history)
    for _ in range(2):
        assert played(runner, space.default) == pytest.approx(15)


def test_else_the_nearest_answers(study: AskTellStudy) -> None:
    """A number may be far before a choice differs."""
    runner = ReplayRunner(study.record, study.history)
    assert played(runner, Strategy({"pause": 6.0})) == pytest.approx(15)
    assert runner.distance == pytest.approx(1.0 / 9.9)
    assert played(runner, Strategy({"coding": "fp16"})) == pytest.approx(10)
    assert runner.distance == pytest.approx(4.0 / 9.9)


def test_without_trials_there_is_nothing_to_play(store: TraceStore) -> None:
    empty = AskTellStudy.create(SPACE, store=store)
    with pytest.raises(StudyError, match="no trials to replay"):
        ReplayRunner(empty.record, empty.history)


def test_a_trace_is_a_table_in_one_line(
    study: AskTellStudy, store: TraceStore, tmp_path: Path
) -> None:
    export_study(store, study.study_id, tmp_path / "trace.jsonl.gz")
    frame = read_trials(tmp_path / "trace.jsonl.gz")
    assert frame.columns[0] == "study" and set(frame["study"]) == {study.study_id}
    assert len(frame) == len(study.history)
    assert frame["step_ms"].iloc[0] == pytest.approx(11.0)
    assert frame["coding"].isna().tolist() == [True, True, False, True]
