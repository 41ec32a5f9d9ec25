"""Whether a script depends on its launcher; mpi4py we import too in jobs under MPI."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hvd_autosync.runtime.collectives import launcher_use
from hvd_autosync.runtime.collectives.launcher_use import import_mpi4py, script_needs_launcher

_FILES = launcher_use._files_of_script


class Communicator:
    """As one of mpi4py's."""


Communicator.__module__ = "mpi4py.MPI"


@pytest.fixture(autouse=True)
def mpi(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module in the place of mpi4py's, not imported yet, and no use of it anywhere."""
    module = ModuleType("mpi4py.MPI")
    package = ModuleType("mpi4py")
    vars(package)["MPI"] = module
    monkeypatch.setattr(launcher_use, "_imported_by", 0)
    monkeypatch.setattr(launcher_use, "_files_of_script", lambda: [])
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    return module


@pytest.mark.parametrize(
    ("line", "needs"),
    [
        ('rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))', True),
        ('gpu = os.environ["HOROVOD_LOCAL_RANK"]', True),
        ('os.getenv("PMI_SIZE")', True),
        ('os.getenv("OMPI_COMM_WORLD_NODE_RANK")', True),
        ('os.environ["PMI_LOCAL_RANK"]', True),
        ("PMI_THRESHOLD = 3", False),
        ('os.environ["HOROVOD_CYCLE_TIME"]; rank, MY_PMI_RANK = hvd.rank(), 0', False),
    ],
)
def test_a_script_that_names_a_variable_of_one_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, needs: bool
) -> None:
    (tmp_path / "script.py").write_text(f"import os\n{line}\n")
    monkeypatch.setattr(launcher_use, "_files_of_script", lambda: [tmp_path / "script.py"])
    assert script_needs_launcher() is needs


def test_installed_packages_are_no_scripts() -> None:
    names = {each.name for each in _FILES()}
    assert Path(__file__).name in names
    assert not names & {"os.py", "launcher_use.py", "mpi_ops.py", "_tensor.py"}


def test_a_script_that_does_not_import_it() -> None:
    assert not script_needs_launcher()


def test_a_script_that_imports_it(mpi: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if we would import it afterwards."""
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    import_mpi4py()
    assert script_needs_launcher()


@pytest.mark.parametrize("what", ["nothing", "module", "package", "communicator"])
def test_a_script_that_imports_it_after_we_did(
    mpi: ModuleType, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    monkeypatch.setattr(launcher_use, "_imported_by", os.getpid())
    values = {"module": mpi, "package": sys.modules["mpi4py"], "communicator": Communicator()}
    script = ModuleType("script")
    vars(script)["name"] = values.get(what)
    monkeypatch.setitem(sys.modules, "script", script)
    assert script_needs_launcher() is (what != "nothing")
