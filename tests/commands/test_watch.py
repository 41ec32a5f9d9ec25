"""Watching a study from another terminal."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvd_autosync.commands import watch
from hvd_autosync.commands.cli import app
from hvd_autosync.commands.watch import watched
from hvd_autosync.search_space import SearchSpace, TrialResult, TrialStatus, catalogue_knob
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import StudyStatus, TraceStore, export_study, import_studies
from hvd_autosync.traces.owner import HEARTBEAT_LIMIT_S, HEARTBEAT_S, Owner

SPACE = SearchSpace((catalogue_knob("buckets"),))


class Clock:
    """The watch's clock; waiting takes no time.

    Attributes:
        now_s: Seconds since it began.
        on_wait: Called after each wait.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.on_wait: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_wait()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    return clock


def _change(path: str, columns: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE hvd_autosync_studies SET {columns}", values)


def test_trials_are_printed_as_they_end_and_then_the_result(tmp_path: Path) -> None:
    path = str(tmp_path / "traces.db")
    study = AskTellStudy.create(
        SPACE, store=path, settings=StudySettings(trials=2, seed=1), command=("python", "train.py")
    )
    lines = watched(TraceStore(path), study.study_id, every_s=0.01)
    assert next(lines) == f"study {study.study_id}: python train.py"
    told = 0
    while (trial := study.ask()) is not None:
        fast = bool(trial.strategy.get("buckets"))
        study.tell(trial, [0.1 if fast else 0.2] * 12)
        assert next(lines).startswith(f"trial {trial.number} (")
        told += 1
    assert told > 2
    (last,) = lines
    assert "faster than the default" in last
    printed = CliRunner().invoke(app, ["watch", "--store", path]).output.splitlines()
    assert len(printed) == told + 2
    assert printed[-1] == last


def test_each_of_several_trials_in_flight_is_printed_once(tmp_path: Path) -> None:
    path = str(tmp_path / "traces.db")
    study = AskTellStudy.create(SPACE, store=path, settings=StudySettings(trials=6, seed=1))
    lines = watched(TraceStore(path), study.study_id, every_s=0.0)
    next(lines)
    default = study.ask()
    assert default is not None
    study.tell(default, [0.2] * 12)
    assert next(lines).startswith("trial 0 ")
    first, second = study.ask(), study.ask()
    assert first is not None and second is not None
    study.tell(second, [0.1] * 12)
    assert next(lines).startswith(f"trial {second.number} ")
    study.tell(first, [0.1] * 12)
    assert next(lines).startswith(f"trial {first.number} ")


def test_it_ends_where_the_study_was_interrupted(tmp_path: Path, clock: Clock) -> None:
    path = str(tmp_path / "traces.db")
    study = AskTellStudy.create(SPACE, store=path, settings=StudySettings(trials=2, seed=1))
    lines = watched(TraceStore(path), study.study_id)
    next(lines)
    trial = study.ask()
    assert trial is not None
    study.tell(trial, [0.2] * 12)
    assert next(lines).startswith("trial 0 (default)")
    assert study.ask() is not None
    study.store.let_go(study.study_id)
    (last,) = lines
    assert last.startswith(f"study {study.study_id} was interrupted after 1 trial: ")
    printed = CliRunner().invoke(app, ["watch", "--store", path]).output.splitlines()
    assert len(printed) == 3 and printed[-1] == last
    assert clock.now_s > 2 * HEARTBEAT_S, "each was sure that no driver follows"


def test_an_imported_study_that_was_running_ends(tmp_path: Path, clock: Clock) -> None:
    study = AskTellStudy.create(SPACE, store=str(tmp_path / "traces.db"))
    trial = study.ask()
    assert trial is not None
    study.tell(trial, [0.2] * 12)
    export_study(study.store, study.study_id, tmp_path / "study.jsonl")
    store = TraceStore(tmp_path / "other.db")
    import_studies(store, tmp_path / "study.jsonl")
    *_, last = watched(store, study.study_id)
    assert last.endswith("was interrupted after 1 trial: it was imported before its end")
    listed = CliRunner().invoke(app, ["traces", "list", "--store", store.name]).output
    assert "interrupted" in listed
    assert store.interrupted() == frozenset(), "it cannot be resumed"


@pytest.mark.parametrize("info", [{"ask_s": None}, {"ask_s": "long"}, {"candidates": 2}, {}])
def test_an_imported_trial_may_say_nothing_of_how_it_was_chosen(
    tmp_path: Path, info: dict[str, object]
) -> None:
    study = AskTellStudy.create(SPACE, store=str(tmp_path / "traces.db"))
    for kind in ("default", "confirm"):
        number = study.store.ask(study.study_id, SPACE.default, kind, info)
        study.store.tell(study.study_id, number, TrialResult(TrialStatus.COMPLETED, total_s=5.0))
    study.store.finish(study.study_id, StudyStatus.FAILED, {"reason": "rank 1 was killed"}, None)
    _, first, second, _ = watched(study.store, study.study_id)
    assert first.startswith("trial 0 (default)")
    assert second.startswith("trial 1 (confirm, round 1)")


def test_a_study_that_failed_says_why(tmp_path: Path) -> None:
    path = str(tmp_path / "traces.db")
    study = AskTellStudy.create(SPACE, store=path)
    study.store.finish(study.study_id, StudyStatus.FAILED, {"reason": "rank 1 was killed"}, None)
    *_, last = watched(TraceStore(path), study.study_id)
    assert last == f"study {study.study_id} failed: rank 1 was killed"


def test_a_driver_elsewhere_that_was_silent_for_long_is_still_watched(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Owner, "alive", lambda _, age_s: age_s <= HEARTBEAT_LIMIT_S)
    path = str(tmp_path / "traces.db")
    study = AskTellStudy.create(SPACE, store=path, settings=StudySettings(trials=2, seed=1))
    trial = study.ask()
    assert trial is not None

    def go_on() -> None:
        if clock.now_s == 10.0:
            study.tell(trial, [0.2] * 12)
        if clock.now_s in (15.0, 40.0):  # for less than the interval, then for good
            _change(path, "heartbeat_s = ?", time.time() - 2 * HEARTBEAT_LIMIT_S)
        if clock.now_s == 30.0:
            study.store.heartbeat(study.study_id)

    _change(path, "heartbeat_s = ?", time.time() - 2 * HEARTBEAT_LIMIT_S)
    clock.on_wait = go_on
    _, told, last = watched(TraceStore(path), study.study_id)
    assert told.startswith("trial 0 (default)")
    assert " was interrupted after 1 trial: " in last
    assert clock.now_s == 40.0 + HEARTBEAT_S + 1.0


def test_another_study_may_have_a_damaged_owner(tmp_path: Path, clock: Clock) -> None:
    path = str(tmp_path / "traces.db")
    AskTellStudy.create(SPACE, store=path)
    _change(path, "owner = '[]'")
    study = AskTellStudy.create(SPACE, store=path)
    study.store.let_go(study.study_id)
    *_, last = watched(TraceStore(path), study.study_id)
    assert last.startswith(f"study {study.study_id} was interrupted after 0 trials: ")


def test_a_look_without_news_reads_no_trials(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = AskTellStudy.create(SPACE, store=str(tmp_path / "traces.db"))
    trial = study.ask()
    assert trial is not None
    loads: set[float] = set()

    def go_on() -> None:
        if clock.now_s == 100.0:
            study.tell(trial, [0.2] * 12)
        if clock.now_s == 200.0:
            study.store.finish(study.study_id, StudyStatus.FAILED, {"reason": "x"}, None)

    for name in ("study", "trials"):
        read = getattr(TraceStore, name)

        def noted(*given: object, read: Callable[..., object] = read) -> object:
            loads.add(clock.now_s)
            return read(*given)

        monkeypatch.setattr(TraceStore, name, noted)
    clock.on_wait = go_on
    assert len(list(watched(study.store, study.study_id))) == 3
    assert loads == {0.0, 100.0, 200.0}


def test_the_help_says_how_long_a_watch_waits_for_a_study_that_nothing_runs() -> None:
    text = " ".join(CliRunner().invoke(app, ["watch", "--help"]).output.split())
    assert f"no process has run it for {HEARTBEAT_S:.0f} seconds" in text
    assert f"({HEARTBEAT_LIMIT_S + HEARTBEAT_S:.0f} seconds if it ran on another machine" in text
