"""Installing adds exactly our files and changes nothing else; uninstalling removes them all."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest


class Environment:
    """A virtual environment without pip; the pip of the tests installs into it, offline."""

    def __init__(self, root: Path) -> None:
        venv.create(root, symlinks=True)
        self.root = root
        self.python = root / "bin" / "python"

    def pip(self, *arguments: str | Path) -> None:
        """Runs pip on this environment."""
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python"]
        run(*pip, self.python, *arguments)

    def files(self) -> set[str]:
        """Every file in the environment, byte code included."""
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Runs a command that must succeed and returns what it printed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, text=True, capture_output=True, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """A fresh environment."""
    return Environment(tmp_path / "environment")


@pytest.mark.parametrize("kind", ["wheel", "wheel_of_sdist", "editable_wheel"])
def test_install_and_uninstall(
    kind: str, environment: Environment, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    before = environment.files()
    environment.pip("install", "--no-deps", "--no-index", request.getfixturevalue(kind))

    added = {Path(name).name for name in environment.files() - before}
    assert {"hvd_autosync.pth", "hvd-autosync"} <= added
    code = "import hvd_autosync, sys; print(hvd_autosync.__file__, 'torch' in sys.modules)"
    origin, torch_imported = run(environment.python, "-c", code, cwd=tmp_path).split()
    assert ("checkout" in Path(origin).parts) == (kind == "editable_wheel")
    assert torch_imported == "False"

    environment.pip("uninstall", "--yes", "hvd-autosync")
    assert environment.files() == before


def test_editable_install_follows_the_links(
    environment: Environment, editable_wheel: Path, source: Path, tmp_path: Path
) -> None:
    environment.pip("install", "--no-deps", "--no-index", editable_wheel)
    code = "import importlib.util as u; print(u.find_spec('hvd_autosync.launch.job').origin)"
    origin = run(environment.python, "-c", code, cwd=tmp_path).strip()
    assert Path(origin).resolve() == source / "launch" / "job.py"


def test_install_leaves_the_rest_of_a_complete_environment_alone(wheel: Path) -> None:
    """pip, asked what it would do here, would install our wheel and nothing else."""
    for name in ("torch", "horovod", "botorch"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed here: make dev installs it")
    report = run(
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--quiet"),
        *("--report", "-", "--no-index", wheel),
    )
    changed = {entry["metadata"]["name"] for entry in json.loads(report)["install"]}
    assert changed <= {"hvd-autosync"}
