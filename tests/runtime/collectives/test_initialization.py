"""How ranks under MPI end, where our import of mpi4py has initialized it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.runtime.collectives import initialization

WORKER = Path(__file__).parents[1] / "workers" / "mpi_end.py"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.usefixtures("horovodrun"),
]


def run(kind: str, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    return subprocess.run(
        [*words, sys.executable, str(WORKER), kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )


def test_an_mpi4py_for_another_mpi_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(Get_size=lambda: 1)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(COMM_WORLD=world))
    assert initialization._mpi_has(1) and not initialization._mpi_has(2)


def test_a_rank_that_fails_waits_for_no_other() -> None:
    """As with Horovod alone, which finalizes MPI on all ranks where one shuts it down."""
    done = run("fails")
    assert done.returncode == 1 and "deliberate" in done.stdout, done.stdout


def test_a_rank_that_leaves_after_its_shutdown_ends_no_other() -> None:
    done = run("leaves")
    assert done.returncode == 0 and "saved" in done.stdout, done.stdout
    assert done.stdout.count("noted") == 2


def test_what_is_done_at_the_end_is_done_before_a_rank_waits_for_others() -> None:
    done = run("ends")
    assert done.returncode == 0 and done.stdout.count("noted") == 2, done.stdout
