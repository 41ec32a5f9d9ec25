"""Studies in a storage of Optuna."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hvd_autosync.api.results import Study
from hvd_autosync.commands.cli import app
from hvd_autosync.errors import StoreError
from hvd_autosync.traces.optuna_export import export_to_optuna

optuna = pytest.importorskip("optuna")
_HOST = "postgresql://me:s3cret@host/db"
TABLE = Path(__file__).parents[2] / "benchmarks" / "traces" / "vgg-100mbit-codec.jsonl.gz"


@pytest.fixture
def far_from_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("far_from_utc")
def test_optuna_has_every_trial(tmp_path: Path) -> None:
    study, url = Study.load(TABLE), f"sqlite:///{tmp_path / 'optuna.db'}"
    some = study.history[:12]  # each is several commits of Optuna's
    name = export_to_optuna(study.record, some, url)
    there = optuna.load_study(study_name=name, storage=url)
    assert len(there.trials) == len(some)
    frame = study.trials[:12]
    best = frame.loc[frame.step_ms.idxmin()]
    assert there.best_value == pytest.approx(best.step_ms)
    assert there.best_trial.params["cycle_time_ms"] == best.cycle_time_ms
    assert there.trials[0].user_attrs["kind"] == "default"
    begun = datetime.fromisoformat(some[0].asked_at)
    assert there.trials[0].datetime_start.timestamp() == pytest.approx(begun.timestamp())
    with pytest.raises(StoreError, match="already"):
        export_to_optuna(study.record, some, url)


def test_a_study_that_cannot_be_written_whole_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, url = Study.load(TABLE), f"sqlite:///{tmp_path / 'optuna.db'}"
    some = study.history[:2]
    add, calls = optuna.Study.add_trial, 0

    def add_or_fail(there: Any, trial: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("disk full")
        add(there, trial)

    monkeypatch.setattr(optuna.Study, "add_trial", add_or_fail)
    with pytest.raises(StoreError, match="disk full"):
        export_to_optuna(study.record, some, url)
    name = export_to_optuna(study.record, some, url)
    assert len(optuna.load_study(study_name=name, storage=url).trials) == 2


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("url", [f"{_HOST}?secret=s3cret", "postgresql://host/db?password=s3cret"])
def test_no_message_has_a_password(monkeypatch: pytest.MonkeyPatch, exists: bool, url: str) -> None:

    def create_study(**keywords: Any) -> None:
        if exists:
            raise optuna.exceptions.DuplicatedStudyError
        raise ValueError(f"no answer from {url}, s3cret")

    monkeypatch.setattr(optuna, "create_study", create_study)
    with pytest.raises(StoreError, match=r"://(me:\*\*\*@)?host/db\?") as caught:
        export_to_optuna(Study.load(TABLE).record, (), url)
    assert "s3cret" not in str(caught.value)


def test_the_command_knows_optuna_alone(tmp_path: Path) -> None:
    store = str(tmp_path / "t.db")
    run = CliRunner().invoke
    assert run(app, ["traces", "import", str(TABLE), "--store", store]).exit_code == 0
    wrong = run(app, ["traces", "export", "last", "--to", "excel", "a.xls", "--store", store])
    assert wrong.exit_code != 0 and "'excel'" in wrong.stderr
    nowhere = ["--to", "optuna", "nothing://there", "--store", store]
    refused = run(app, ["traces", "export", "last", *nowhere])
    assert refused.exit_code != 0 and "nothing://there" in refused.stderr
