"""Studies in a storage of Optuna."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvd_autosync.api.results import Study
from hvd_autosync.commands.cli import app
from hvd_autosync.errors import StoreError
from hvd_autosync.traces.optuna_export import export_to_optuna

optuna = pytest.importorskip("optuna")
TABLE = Path(__file__).parents[2] / "benchmarks" / "traces" / "vgg-100mbit-codec.jsonl.gz"


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
    with pytest.raises(StoreError, match="already"):
        export_to_optuna(study.record, some, url)


def test_the_command_knows_optuna_alone(tmp_path: Path) -> None:
    store = str(tmp_path / "t.db")
    run = CliRunner().invoke
    assert run(app, ["traces", "import", str(TABLE), "--store", store]).exit_code == 0
    wrong = run(app, ["traces", "export", "last", "--to", "excel", "a.xls", "--store", store])
    assert wrong.exit_code != 0 and "'excel'" in wrong.stderr
    nowhere = ["--to", "optuna", "nothing://there", "--store", store]
    refused = run(app, ["traces", "export", "last", *nowhere])
    assert refused.exit_code != 0 and "nothing://there" in refused.stderr
