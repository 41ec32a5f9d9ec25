"""Whether a script uses mpi4py, which we import too in jobs under MPI."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from hvd_autosync.runtime.collectives import mpi4py_use
from hvd_autosync.runtime.collectives.mpi4py_use import import_mpi4py, script_uses_mpi4py


class Communicator:
    """As one of mpi4py's."""


Communicator.__module__ = "mpi4py.MPI"


@pytest.fixture(autouse=True)
def mpi(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module in the place of mpi4py's, not imported yet, and no use of it anywhere."""
    module = ModuleType("mpi4py.MPI")
    package = ModuleType("mpi4py")
    vars(package)["MPI"] = module
    monkeypatch.setattr(mpi4py_use, "_imported_here", False)
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    return module


def test_a_script_that_does_not_import_it() -> None:
    assert not script_uses_mpi4py()


def test_a_script_that_imports_it(mpi: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if we would import it afterwards."""
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    import_mpi4py()
    assert script_uses_mpi4py()


@pytest.mark.parametrize("what", ["nothing", "module", "package", "communicator"])
def test_a_script_that_imports_it_after_we_did(
    mpi: ModuleType, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    monkeypatch.setattr(mpi4py_use, "_imported_here", True)
    values = {"module": mpi, "package": sys.modules["mpi4py"], "communicator": Communicator()}
    script = ModuleType("script")
    vars(script)["name"] = values.get(what)
    monkeypatch.setitem(sys.modules, "script", script)
    assert script_uses_mpi4py() is (what != "nothing")
