"""Watching a study from another terminal."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from hvd_autosync.commands.cli import app
from hvd_autosync.commands.watch import watched
from hvd_autosync.search_space import SearchSpace, catalogue_knob
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import TraceStore

SPACE = SearchSpace((catalogue_knob("buckets"),))


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


def test_it_ends_where_the_study_was_interrupted(tmp_path: Path) -> None:
    path = str(tmp_path / "traces.db")
    study = AskTellStudy.create(SPACE, store=path, settings=StudySettings(trials=2, seed=1))
    lines = watched(TraceStore(path), study.study_id, every_s=0.01)
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
