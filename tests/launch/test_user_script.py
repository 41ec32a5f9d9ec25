"""Commands taken apart."""

import os
import sys
from pathlib import Path

import pytest

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.user_script import user_script

PYTHON = sys.executable


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.path.dirname(PYTHON) + os.pathsep + os.environ["PATH"])


def test_a_script_with_its_arguments() -> None:
    found = user_script(["python", "train.py", "-m", "x", "--lr", "1"])
    assert (found.target, found.module, found.options) == ("train.py", False, ())
    assert found.arguments == ("-m", "x", "--lr", "1")


def test_options_of_the_interpreter_are_told_from_those_of_the_script() -> None:
    found = user_script([PYTHON, "-u", "-W", "ignore", "-Xdev", "train.py", "-v"])
    assert found.options == ("-u", "-W", "ignore", "-Xdev")
    assert found.arguments == ("-v",)


def test_a_module() -> None:
    found = user_script(["python3", "-m", "package.train", "--lr", "1"])
    assert (found.target, found.module, found.arguments) == ("package.train", True, ("--lr", "1"))


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["bash", "run.sh"], "'bash'"), (["./train.py"], "'./train.py'"),
        (["python", "-c", "print()"], "python -c"), (["python"], "no script"),
        (["python", "missing.py"], "'missing.py'"), (["/usr/bin/python3", "train.py"], "not the"),
        (["python9.9", "train.py"], "not found"), (["pythonic", "train.py"], "'pythonic'"),
    ],
)  # fmt: skip
def test_what_cannot_be_forked_is_named(command: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        user_script(command)
