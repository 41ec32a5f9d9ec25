"""Trials in memory: which of them are read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hvd_autosync.errors import StoreError
from hvd_autosync.search_space import Strategy, TrialResult
from hvd_autosync.traces import StudyRecord, TraceStore, TrialRecord, rows
from hvd_autosync.traces.loaded import LoadedTrials


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the trials that are read."""
    numbers: list[int] = []
    record = rows._record

    def noted(kind: type, row: Any) -> Any:
        if kind is TrialRecord:
            numbers.append(row["number"])
        return record(kind, row)

    monkeypatch.setattr(rows, "_record", noted)
    return numbers


def test_only_trials_without_a_known_result_are_read_again(
    store: TraceStore,
    create: Callable[..., StudyRecord],
    make_result: Callable[..., TrialResult],
    read: list[int],
) -> None:
    study_id = create().study_id
    loaded = LoadedTrials(store, study_id)
    assert loaded.read() == []
    for _ in range(4):
        store.ask(study_id, Strategy(), "sobol", {})
    for number in (0, 2):
        store.tell(study_id, number, make_result(0.1))
    assert [trial.result is None for trial in loaded.read()] == [False, True, False, True]
    # As another driver does that has taken the study over.
    store.tell(study_id, 3, make_result(0.2))
    store.ask(study_id, Strategy(), "model", {})
    for expected in ([1, 3, 4], [1, 4]):
        read.clear()
        found = [trial.to_json() for trial in loaded.read()]
        assert read == expected
        assert found == [trial.to_json() for trial in store.trials(study_id)]
    store.delete(study_id)
    with pytest.raises(StoreError, match=study_id):
        loaded.read()


def test_more_trials_are_known_than_a_query_leaves_out(
    store: TraceStore,
    create: Callable[..., StudyRecord],
    make_result: Callable[..., TrialResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "_MOST_LEFT_OUT", 2)
    study_id = create().study_id
    loaded = LoadedTrials(store, study_id)
    for number in range(9):
        store.ask(study_id, Strategy(), "sobol", {})
        if number % 2:
            store.tell(study_id, number, make_result(0.1))
    for _ in range(2):
        assert [trial.number for trial in loaded.read()] == [*range(9)]
