"""What a word names: a trace file, or a study of the store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hvd_autosync.errors import StoreError
from hvd_autosync.traces import StudyRecord, TraceStore, export_study
from hvd_autosync.traces.opening import is_file, open_trace


@pytest.fixture
def saved(tmp_path: Path, store: TraceStore, finished: StudyRecord) -> str:
    """The path of a store with one study."""
    path = str(tmp_path / "traces.db")
    TraceStore(path).add([(finished, store.trials(finished.study_id))])
    return path


def test_a_folder_of_the_name_hides_no_study(
    saved: str, finished: StudyRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("last", finished.study_id):
        (tmp_path / name).mkdir()
        assert not is_file(name)
        assert open_trace(name, saved)[1].study_id == finished.study_id


def test_a_file_of_the_name_comes_before_the_study(
    saved: str,
    store: TraceStore,
    finished: StudyRecord,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    export_study(store, finished.study_id, tmp_path / "study.jsonl")
    shutil.move("study.jsonl", "last")
    assert is_file("last")
    opened, _ = open_trace("last", saved)
    assert opened.name != saved


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no file"):
        open_trace(str(tmp_path), None)
