from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

from hvd_autosync.search_space import SearchSpace, Strategy, Task, TrialResult
from hvd_autosync.traces import StudyRecord, StudyStatus, TrialRecord
from hvd_autosync.traces.records import timestamp


def test_a_study_goes_to_json_text_and_back(task: Task, space: SearchSpace) -> None:
    study = StudyRecord(
        "0123456789ab",
        timestamp(),
        "job",
        ("horovodrun", "x"),
        {"seed": 1},
        {"torch": "2"},
        StudyStatus.FINISHED,
        task,
        space,
        {"gain": 1.2},
        Strategy({"controller": "mpi"}),
    )
    again = StudyRecord.from_json(json.loads(json.dumps(study.to_json())))
    assert again.to_json() == study.to_json()
    assert (again.space, again.winner, again.status) == (space, study.winner, study.status)
    assert again.task is not None and again.task.fingerprint == task.fingerprint


def test_a_study_that_knows_nothing_yet_goes_to_json_and_back() -> None:
    study = StudyRecord(
        "0123456789ab", timestamp(), "", (), {}, {}, StudyStatus.RUNNING, None, None, None, None
    )
    assert StudyRecord.from_json(json.loads(json.dumps(study.to_json()))) == study


def test_a_trial_goes_to_json_text_and_back(make_result: Callable[..., TrialResult]) -> None:
    result = make_result(0.25)
    trial = TrialRecord(
        "0123456789ab",
        3,
        "model",
        Strategy({"cycle_time_ms": 0.1}),
        timestamp(),
        timestamp(),
        {"expected_s": 0.2},
        result,
    )
    again = TrialRecord.from_json(json.loads(json.dumps(trial.to_json())))
    assert again.to_json() == trial.to_json()
    assert again.result is not None and again.result.step_time == result.step_time


def test_an_empty_winner_is_not_no_winner() -> None:
    fields = StudyRecord(
        "0123456789ab",
        timestamp(),
        "",
        (),
        {},
        {},
        StudyStatus.FINISHED,
        None,
        None,
        {},
        Strategy(),
    ).to_json()
    assert StudyRecord.from_json(fields).winner == Strategy()


def test_timestamps_sort_as_text_by_time() -> None:
    whole = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    elsewhere = (whole + timedelta(microseconds=1)).astimezone(timezone(timedelta(hours=9)))
    assert timestamp(whole) == "2026-01-02T03:04:05.000000+00:00"
    assert timestamp(whole) < timestamp(elsewhere) < timestamp()
