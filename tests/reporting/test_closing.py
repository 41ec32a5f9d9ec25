from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hvd_autosync.reporting.closing import closing_lines
from hvd_autosync.traces import StudyRecord, StudyStatus


def test_the_choice_with_its_interval(finished: StudyRecord) -> None:
    answer, _ = closing_lines(finished)
    assert answer.startswith("1.32x faster than the default (90 % interval 1.3")
    assert answer.endswith("controller=mpi, cycle_time_ms=5 ms, buckets=8")


def test_why_the_default_is_kept(no_gain: StudyRecord) -> None:
    answer, _ = closing_lines(no_gain)
    assert answer == (
        "no gain found, the default is kept: no candidate was faster with confidence when "
        "measured again"
    )


def test_how_to_see_the_trace_in_the_named_store(finished: StudyRecord, tmp_path: Path) -> None:
    file = tmp_path / "my traces.db"
    _, trace = closing_lines(finished, str(file))
    assert trace == f"trace: hvd-autosync show {finished.study_id} --store '{file}'"


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("postgresql://me:pw@db/traces?sslmode=require", "me:***@db/traces?sslmode=require"),
        ("postgresql://me@/t?host=/run/pg&password=pw", "me@/t?host=%2Frun%2Fpg&password=***"),
        ("mssql+pyodbc:///?odbc_connect=PWD%3Dpw", "?odbc_connect=***"),
        ("sqlite:////tmp/t.db?timeout=5", "sqlite:////tmp/t.db?timeout=5"),
    ],
)
def test_a_database_is_named_with_its_parameters_and_without_secrets(
    finished: StudyRecord, location: str, shown: str
) -> None:
    _, trace = closing_lines(finished, location)
    assert shown in trace and "pw" not in trace


def test_a_store_with_a_password_that_the_environment_names_needs_no_option(
    finished: StudyRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = "postgresql://me:s3cret@db/traces"
    monkeypatch.setenv("HVD_AUTOSYNC_STORE", location)
    _, trace = closing_lines(finished, location)
    shows = f"trace: hvd-autosync show {finished.study_id}"
    assert trace == f"{shows} (in postgresql://me:***@db/traces)"
    _, other = closing_lines(finished, f"{location}2")
    assert other == f"{shows} --store 'postgresql://me:***@db/traces2'"


def test_how_to_see_the_trace_in_the_default_store(finished: StudyRecord) -> None:
    _, trace = closing_lines(finished)
    assert trace.startswith(f"trace: hvd-autosync show {finished.study_id} (in ")
    assert trace.endswith("traces.db)")


def test_a_study_that_failed_found_nothing(finished: StudyRecord) -> None:
    failed = replace(finished, status=StudyStatus.FAILED, outcome={"reason": "it crashed"})
    assert closing_lines(failed)[0] == f"study {finished.study_id} failed: it crashed"
