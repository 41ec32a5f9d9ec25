"""How ranks under MPI end, where our import of mpi4py has initialized it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.runtime.collectives import initialization, launcher_use

WORKER = Path(__file__).parents[1] / "workers" / "mpi_end.py"


def real(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that starts ranks under MPI."""
    for mark in ("cluster", "mpi", "slow"):
        test = getattr(pytest.mark, mark)(test)
    return pytest.mark.usefixtures("horovodrun")(test)


def run(kind: str, folder: Path, limit_s: float = 120) -> subprocess.CompletedProcess[str]:
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    return subprocess.run(
        [*words, sys.executable, str(WORKER), kind, str(folder / "note")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An mpi4py that is a world of one rank, in a job under MPI."""
    world, ends = SimpleNamespace(Get_size=lambda: 1), list[int]()
    made = SimpleNamespace(COMM_WORLD=world, ends=ends, Finalize=lambda: ends.append(1))
    made.Is_initialized, made.Is_finalized = lambda: True, lambda: False
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", made)
    monkeypatch.setattr(launcher_use, "_finalizing", False)
    return made


@pytest.mark.parametrize(("ranks", "can"), [(1, True), (2, False)])
def test_an_mpi4py_for_another_mpi_allows_no_second_initialization(
    mpi: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, ranks: int, can: bool
) -> None:
    horovod = SimpleNamespace(
        _basics=SimpleNamespace(is_initialized=lambda: False),
        mpi_enabled=lambda: True,
        size=lambda: ranks,
    )
    monkeypatch.setattr(initialization, "mpi_ops", horovod)
    monkeypatch.setattr(initialization, "_LAST", None)
    monkeypatch.setattr(initialization, "_WATCHERS", [])
    initialization._recording(lambda *_: None)()
    last = initialization.last_initialization()
    assert last is not None and last.keeps_mpi is can


def test_mpi_is_finalized_once(mpi: SimpleNamespace) -> None:
    """Also where a function at the end of Python comes while a shutdown finalizes it."""
    mpi.Finalize = lambda: (mpi.ends.append(1), launcher_use.finalize_mpi())
    launcher_use.finalize_mpi()
    assert mpi.ends == [1]


@real
def test_a_rank_that_fails_waits_for_no_other(tmp_path: Path) -> None:
    """As with Horovod alone, which finalizes MPI on all ranks where one shuts it down."""
    done = run("fails", tmp_path)
    assert done.returncode == 1 and "deliberate" in done.stdout, done.stdout


@real
def test_a_rank_that_leaves_after_its_shutdown_ends_no_other(tmp_path: Path) -> None:
    done = run("leaves", tmp_path)
    assert done.returncode == 0 and "saved" in done.stdout, done.stdout
    assert done.stdout.count("noted") == 2


@real
def test_what_is_done_at_the_end_is_done_before_a_rank_waits_for_others(tmp_path: Path) -> None:
    done = run("ends", tmp_path)
    assert done.returncode == 0 and done.stdout.count("noted\n") == 2, done.stdout
    assert "noted before" in done.stdout, "while the other had not ended"
