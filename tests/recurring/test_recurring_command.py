"""``hvd-autosync recurring``."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvd_autosync.commands import cli
from hvd_autosync.search_space import Strategy
from hvd_autosync.traces import TraceStore
from hvd_autosync.traces.records import timestamp
from hvd_autosync.traces.runs import RunRecord

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TraceStore:
    monkeypatch.setenv("HVD_AUTOSYNC_STORE", str(tmp_path / "traces.db"))
    monkeypatch.setenv("COLUMNS", "140")
    return TraceStore(tmp_path / "traces.db")


def keep(store: TraceStore, share: float, metric: float, whole_s: float = 100) -> None:
    status = "completed" if metric == metric else "diverged"
    run = RunRecord(
        "abc",
        0,
        ("horovodrun", "[x]"),
        timestamp(),
        Strategy(),
        share,
        metric,
        "script",
        whole_s * (1 + share) / 2,
        960,
        status,
    )
    store.keep_run(run)


def said(*words: str, status: int = 0, answer: str = "") -> str:
    done = CliRunner().invoke(cli.app, ["recurring", *words], input=answer)
    assert done.exit_code == status, done.output
    return done.output


def test_runs_are_listed(store: TraceStore) -> None:
    assert "no recurring job has run yet" in said()
    keep(store, 1.0, 0.9)
    keep(store, 0.5, float("nan"))
    text = said("abc")
    assert "horovodrun '[x]'" in text and "0.9" in text and "diverged" in text
    keep(store, 1.0, 0.9, whole_s=36004)
    assert " 36004 " in said("abc")


def test_runs_are_exported_simulated_and_forgotten(store: TraceStore, tmp_path: Path) -> None:
    for share in (1.0, 1.0, 0.5, 0.25, 0.0):
        keep(store, share, 0.9 if share else float("nan"))
    file = str(tmp_path / "runs.csv")
    said("abc", "--export", file)
    program = BENCHMARKS / "recurring_recorded.py"
    words = [sys.executable, str(program), file, "--tolerance", "0.01", "--games", "3"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "binary" in text and "bayesian" in text and "6 (6 .. 6)" in text
    assert "deleted 5 runs of job abc" in said("abc", "--forget", "--yes")
    assert store.runs() == []


@pytest.mark.parametrize("damage", ["7", "{"])
def test_damaged_runs_can_be_forgotten(store: TraceStore, tmp_path: Path, damage: str) -> None:
    keep(store, 1.0, 0.9)
    with sqlite3.connect(tmp_path / "traces.db") as database:
        database.execute("UPDATE hvd_autosync_runs SET result = ?", [damage])
    assert "--forget" in said("abc", status=1)
    assert "deleted 1 run of job abc" in said("abc", "--forget", "--yes")


def test_runs_are_deleted_after_consent(store: TraceStore) -> None:
    keep(store, 1.0, 0.9)
    said("abc", "--forget", status=1)  # no answer
    assert len(store.runs()) == 1
    said("abc", "--forget", answer="y\n")
    assert store.runs() == []


def test_runs_are_deleted_once_their_file_is_written(store: TraceStore, tmp_path: Path) -> None:
    keep(store, 1.0, 0.9)
    said("abc", "--export", str(tmp_path / "no" / "runs.csv"), "--forget", "--yes", status=1)
    assert len(store.runs()) == 1
    said("abc", "--export", str(tmp_path / "runs.csv"), "--forget", "--yes")
    assert store.runs() == [] and len((tmp_path / "runs.csv").read_text().splitlines()) == 2


def test_a_file_that_exists_is_replaced_only_on_request(store: TraceStore, tmp_path: Path) -> None:
    keep(store, 1.0, 0.9)
    file = tmp_path / "runs.csv"
    file.write_text("of another job")
    refused = said("abc", "--export", str(file), "--forget", "--yes", status=1)
    assert refused.endswith("  Name another file, or give --overwrite.\n")
    assert file.read_text() == "of another job" and len(store.runs()) == 1
    said("abc", "--export", str(file), "--overwrite")
    assert len(file.read_text().splitlines()) == 2


def test_what_does_not_exist_is_named(store: TraceStore) -> None:
    said("nobody", status=1)
    asked_nothing = said("nobody", "--forget", status=1)
    named = f"error: {store.name} has no runs of a recurring job 'nobody'"
    assert asked_nothing.startswith(named)
    said("nobody", "--forget", "--yes", status=1)
    said("--forget", status=2)
