"""Results in files, while the store takes none."""

import math
import os
import sqlite3
import time
from datetime import datetime
from pathlib import Path

import pytest

from hvd_autosync.errors import StoreError
from hvd_autosync.search_space import RankReport, Strategy, TrialResult, TrialStatus
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.traces import TraceStore
from hvd_autosync.traces.unsaved import keep_unsaved, take_unsaved

RESULT = TrialResult(TrialStatus.CRASHED, "status 3", total_s=3.0)


@pytest.fixture
def store(tmp_path: Path) -> TraceStore:
    return TraceStore(tmp_path / "traces.db")


def begin(store: TraceStore) -> str:
    study = store.create_study(job_key="job", command=(), settings={}, versions={})
    store.ask(study.study_id, Strategy(), "default", {})
    return study.study_id


def test_a_result_is_taken_once(store: TraceStore) -> None:
    study, other = begin(store), begin(store)
    path = keep_unsaved(study, 0, RESULT)
    assert take_unsaved(store, other) == [] and path.exists()
    assert take_unsaved(store, study) == [0] and not path.exists()
    assert store.trials(study)[0].result == RESULT and store.trials(other)[0].result is None
    assert take_unsaved(store, study) == []


def test_what_the_store_has_meanwhile_stays(store: TraceStore) -> None:
    study = begin(store)
    path = keep_unsaved(study, 0, RESULT)
    told = TrialResult(TrialStatus.CRASHED, "status 1")
    store.tell(study, 0, told)
    assert take_unsaved(store, study) == [] and not path.exists()
    assert store.trials(study)[0].result == told


def test_it_was_told_when_it_was_written(store: TraceStore) -> None:
    """A study that goes on a day later does not take it for a result of now."""
    study = begin(store)
    (trial,) = store.trials(study)
    path = keep_unsaved(study, 0, RESULT)
    os.utime(path, (time.time() + 60,) * 2)
    take_unsaved(store, study)
    told = datetime.fromisoformat(store.trials(study)[0].told_at or "")
    assert 55 < (told - datetime.fromisoformat(trial.asked_at)).total_seconds() < 120
    # Not before it was asked for, whatever the clock of a file server says.
    other = begin(store)
    (trial,) = store.trials(other)
    os.utime(keep_unsaved(other, 0, RESULT), (0, 0))
    take_unsaved(store, other)
    assert store.trials(other)[0].told_at == trial.asked_at


@pytest.mark.parametrize("text", ["", "[]", '{"status": "completed", "steps": 3}', "\xff"])
def test_a_damaged_file_stays_and_is_named(
    store: TraceStore, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    study = begin(store)
    path = keep_unsaved(study, 0, RESULT)
    path.write_text(text, encoding="latin1")
    assert take_unsaved(store, study) == []
    assert str(path) in caplog.text and path.exists()


def test_a_result_that_can_be_kept_nowhere_is_said_to_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = AskTellStudy.create(store=f"sqlite:///{tmp_path}/traces.db?timeout=0.1")
    trial = study.ask()
    assert trial is not None
    other = sqlite3.connect(tmp_path / "traces.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with pytest.raises(StoreError, match=r"the result of trial 0 is lost: cannot make .*/file/"):
        study.tell(trial, [0.1] * 20)
    other.close()
    study.tell(trial, [0.1] * 20)
    assert study.history[0].result is not None


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_result_that_is_no_json_is_refused_as_one_of_our_errors(
    store: TraceStore, wrong: float
) -> None:
    study = AskTellStudy.create(store=store)
    trial = study.ask()
    assert trial is not None
    rank = RankReport(0, "a", (0.1,) * 20, blocked_s=(wrong,) * 20)
    with pytest.raises(StoreError, match=r"trial 0 is lost: .* as JSON") as refused:
        study.tell(trial, TrialResult(TrialStatus.COMPLETED, ranks=(rank,)))
    assert "Use finite numbers" in refused.value.hint
    study.tell(trial, [0.1] * 20)
    assert study.history[0].result is not None
