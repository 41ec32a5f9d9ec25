"""The tools behind ``make gpu-check``, as far as they need no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"
THREE_TESTS = """
import pytest
def test_one(): pass
def test_two(): assert 0
def test_three(): pytest.skip("needs what is missing")
"""


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module ``gpu_check``, which reports into a folder of the test's."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import gpu_check

    monkeypatch.setattr(gpu_check, "REPORTS", tmp_path)
    return gpu_check


def test_what_is_gathered_is_complete_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import gpu_wheels

    found = gpu_wheels.installed_closure("hvd-autosync[examples]", "horovod")
    assert {"horovod", "msgspec", "linear-operator", "scikit-learn"} <= found.keys()
    assert "torch" not in found
    assert not {name for name in found if name.startswith("nvidia")}
    assert "jupyterlab" not in found  # of an extra that was not asked for


def test_outcomes_are_counted(checks: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(THREE_TESTS)
    check = checks.Check("three tests", Path(sys.prefix), (str(tmp_path / "test_three.py"),))
    outcome = checks.run(check)
    assert outcome[1:4] == (1, 1, 1)
    assert "needs what is missing" in (tmp_path / "three-tests.xml").read_text()


@pytest.mark.parametrize("arguments", [("--no-such-option",), ("-k", "nothing")])
def test_a_check_of_which_nothing_ran_has_failed(
    arguments: tuple[str, ...], checks: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "test_three.py").write_text(THREE_TESTS)
    (tmp_path / "none.xml").write_text("of an earlier run")
    words = (str(tmp_path / "test_three.py"), *arguments)
    assert checks.run(checks.Check("none", Path(sys.prefix), words)).failed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOLS / "gpu_check.py")], text=True, capture_output=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: torch {torch.__version__}")
    assert "finds no GPU" in done.stderr
