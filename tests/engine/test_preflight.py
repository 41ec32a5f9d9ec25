"""Checks before a job is launched."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_autosync.commands import flag
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.preflight import check_controller
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch import facts
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import HorovodBuild, Host

JOB = Job(("-np", "2"), (sys.executable, __file__), (Host("localhost", 2),))


@pytest.fixture
def no_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    build = HorovodBuild("0.28.1", gloo=True, mpi=False)
    monkeypatch.setattr(facts, "horovod_build", lambda: build)
    monkeypatch.setattr(facts, "mpi_built", lambda: True)


@pytest.mark.parametrize("mode", ["launched", "live", "auto"])
@pytest.mark.usefixtures("no_mpirun")
def test_a_job_under_an_mpi_that_is_not_there_is_refused_before_there_is_a_study(
    mode: str, tmp_path: Path
) -> None:
    """Its trials could run under Gloo, and its training could not."""
    store = tmp_path / "traces.db"
    with pytest.raises(ConfigurationError, match="there is no mpirun"):
        flag._tune_or_train(JOB, Options(store=str(store), mode=mode))
    assert not store.exists()


@pytest.mark.usefixtures("no_mpirun")
def test_a_strategy_whose_controller_is_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mpi.toml"
    file.write_text('[knobs]\ncontroller = "mpi"\n')
    with pytest.raises(ConfigurationError, match="needs the controller mpi, but there is no mpi"):
        flag._tune_or_train(JOB, Options(strategy=str(file)))
    check_controller(JOB, "gloo")


@pytest.mark.usefixtures("no_mpirun")
def test_a_job_that_names_its_controller_or_is_elastic_needs_no_mpirun() -> None:
    check_controller(replace(JOB, controller="gloo"))
    check_controller(replace(JOB, options=("-np", "2", "--min-np", "1")))
