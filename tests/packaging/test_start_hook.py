"""``hvd_autosync.pth``: nothing at Python's start, except in a launcher or a worker of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import timeit
import venv
from pathlib import Path

import pytest

from hvd_autosync import bootstrap
from hvd_autosync.util.variables import OFF

PTH = Path(__file__).parents[2] / "hvd_autosync.pth"
STUB = "import sys\nsys.stderr.write('hooked\\n')\n"


class Site:
    """An environment with the ``.pth`` file, a stub of our package and one of Horovod's runner."""

    def __init__(self, root: Path) -> None:
        venv.create(root, symlinks=True)
        self.python = root / "bin" / "python"
        (self.site_packages,) = (root / "lib").glob("python*/site-packages")
        shutil.copy(PTH, self.site_packages)
        self.write("hvd_autosync/__init__.py", "")
        self.write("hvd_autosync/bootstrap.py", STUB)
        self.write("horovod/runner/launch.py", "")
        self.script = root / "bin" / "horovodrun"
        self.script.write_text("")

    def write(self, name: str, text: str) -> None:
        """Puts a module beside the ``.pth`` file."""
        path = self.site_packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def start(self, *arguments: str | Path, **variables: str) -> tuple[str, str]:
        """Starts Python, which must succeed; returns its output and its error output."""
        environment = {**os.environ, **variables, "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONPATH", None)
        command = [str(word) for word in (self.python, *arguments)]
        done = subprocess.run(command, text=True, capture_output=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A fresh environment with stubs."""
    return Site(tmp_path / "site")


def test_file_is_one_line_of_ascii_that_site_executes() -> None:
    (line,) = PTH.read_text(encoding="ascii").splitlines()
    assert line.startswith("import ")


def test_other_programs_start_with_the_same_modules(site: Site) -> None:
    code = "import sys; print(sorted(sys.modules))"
    with_pth = site.start("-c", code)
    (site.site_packages / PTH.name).unlink()
    assert with_pth == site.start("-c", code)


@pytest.mark.parametrize(
    "options",
    [
        ["{script}", "-np", "2"],
        ["-u", "{script}"],
        ["-X", "dev", "{script}"],
        ["-m", "horovod.runner.launch", "-np", "2"],
        ["-u", "-m", "horovod.runner.launch"],
        ["-mhorovod.runner.launch"],
    ],
)
def test_launcher_is_hooked(site: Site, options: list[str]) -> None:
    words = [option.format(script=site.script) for option in options]
    assert site.start(*words) == ("", "hooked\n")


def test_worker_is_hooked(site: Site) -> None:
    assert site.start("-c", "", HVD_AUTOSYNC_TRIAL="e30=") == ("", "hooked\n")


@pytest.mark.parametrize(
    ("value", "hooked"),
    [("1", False), ("yes", False), ("any", False), *((text, True) for text in (*OFF, "False"))],
)
def test_disable_variable(site: Site, value: str, hooked: bool) -> None:
    for variables in ({"HVD_AUTOSYNC_TRIAL": "e30="}, {}):
        _, errors = site.start(site.script, HVD_AUTOSYNC_DISABLE=value, **variables)
        assert (errors == "hooked\n") == hooked
        assert hooked or errors == ""


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "the package without bootstrap"])
def test_half_removed_installation_is_silent(site: Site, left: str) -> None:
    (site.site_packages / "hvd_autosync" / "bootstrap.py").unlink()
    if left != "the package without bootstrap":
        (site.site_packages / "hvd_autosync" / "__init__.py").unlink()
    if left == "nothing":
        shutil.rmtree(site.site_packages / "hvd_autosync")
    assert site.start(site.script) == ("", "")
    assert site.start("-c", "", HVD_AUTOSYNC_TRIAL="e30=") == ("", "")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import a_missing_dependency", "No module named 'a_missing_dependency'"),
        ("1 / 0", "division by zero"),
        ("def (", "invalid syntax"),
    ],
)
def test_broken_installation_says_so_in_one_line(site: Site, text: str, cause: str) -> None:
    site.write("hvd_autosync/bootstrap.py", text)
    output, errors = site.start(site.script)
    assert output == ""
    assert errors.count("\n") == 1
    assert errors.startswith("hvd_autosync is off: ") and cause in errors


def test_the_line_takes_little_more_than_its_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which every line of such a file takes; ``benchmarks/start_cost.py`` measures the rest."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--epochs", "90"])
    line = PTH.read_text()
    took, compiled = (
        min(timeit.repeat(each, number=1, repeat=500))
        for each in (lambda: exec(line, {}), lambda: compile(line, "", "exec"))
    )
    assert took < 3 * compiled


@pytest.mark.parametrize(
    ("words", "of_a_rank", "elsewhere"),
    [
        ("-P /usr/bin/horovodrun -np 2 python train.py", True, True),
        ("-m horovod.runner.launch -np 2 python train.py", True, True),
        ("-Imhorovod.runner -np 2", True, False),
        ("-X utf8 horovodrun -np 2", True, True),
        ("train.py --logdir runs/horovodrun", False, True),
        ("-m train horovodrun", False, True),
        ("-m cProfile /usr/bin/horovodrun -np 2", False, True),
        ("-m horovod.runner.run_task host:1", False, True),
        ("train.py", False, False),
        ("", False, False),
    ],
)
def test_a_rank_is_a_launcher_by_its_program_alone(
    words: str, of_a_rank: bool, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script may have any words."""
    monkeypatch.setattr(sys, "orig_argv", ["python", *words.split()])
    assert bootstrap._is_launcher(ranked=True) is of_a_rank
    assert bootstrap._is_launcher(ranked=False) is elsewhere
