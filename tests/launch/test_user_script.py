"""Commands taken apart."""

import os
import stat
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.forked_trial import _run_file
from hvd_autosync.launch.user_script import module_file, script_word, user_script

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


def test_options_of_the_interpreter_are_separated_from_those_of_the_script() -> None:
    found = user_script([PYTHON, "-u", "-W", "ignore", "-Xdev", "-OuW", "once", "train.py", "-v"])
    assert found.options == ("-u", "-W", "ignore", "-Xdev", "-OuW", "once")
    assert found.arguments == ("-v",)


def test_a_forked_script_has_the_annotations_of_a_started_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes of options are often read by them."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script = tmp_path / "train.py"
    script.write_text("width: int = 3")
    _run_file(str(script))
    assert vars(sys.modules["__main__"])["__annotations__"] == {"width": int}


def test_a_forked_script_knows_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a started one, of which the folder may hold its data."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    (tmp_path / "train.py").write_text("import os; os.chdir('/'); print(__file__)")
    started = subprocess.run([PYTHON, "train.py"], capture_output=True, text=True, check=True)
    _run_file("train.py")
    assert capsys.readouterr().out == started.stdout == f"{tmp_path}/train.py\n"


def test_a_module() -> None:
    found = user_script(["python3", "-m", "package.train", "--lr", "1"])
    assert (found.target, found.module, found.arguments) == ("package.train", True, ("--lr", "1"))
    found = user_script(["python3", "-Oum", "package.train"])
    assert (found.target, found.module, found.options) == ("package.train", True, ("-Ou",))


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["python", "-u", "train.py"], "train.py"),
        (["python", "-uW", "ignore", "train.py"], "train.py"),
        (["python", "-um", "package.train"], None),
        (["python", "-uc", "print()", "train.py"], None),
        (["python", "-Wmodule", "train.py"], "train.py"),
        (["bash", "train.sh"], None),
    ],
)
def test_the_word_that_is_a_script(command: list[str], script: str | None) -> None:
    assert script_word(command) == script


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["bash", "run.sh"], "'bash'"),
        (["./train.py"], "'./train.py'"),
        (["python", "-c", "print()"], "python -c"),
        (["python"], "no script"),
        (["python", "missing.py"], "'missing.py'"),
        (["/usr/bin/python3", "train.py"], "not the"),
        (["python9.9", "train.py"], "not found"),
        (["pythonic", "train.py"], "'pythonic'"),
    ],
)
def test_what_cannot_be_forked_is_named(command: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        user_script(command)


def linked(folder: Path, link: Path) -> str:
    """This Python, its folder named through ``link``."""
    link.symlink_to(folder)
    return str(link / os.path.basename(PYTHON))


def test_an_environment_that_is_reached_through_a_link_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = linked(Path(PYTHON).parent, tmp_path / "bin")
    assert user_script([there, "train.py"]).interpreter == there
    monkeypatch.setattr(sys, "executable", there)
    assert user_script([PYTHON, "train.py"]).interpreter == PYTHON
    # As from the shell, whose PATH spells it otherwise than the shebang of horovodrun.
    assert user_script(["python", "train.py"]).target == "train.py"


def test_a_wrapper_is_known_by_what_it_runs(tmp_path: Path) -> None:
    shims = tmp_path / "shims"
    shims.mkdir()
    for name, runs in {"python3": PYTHON, "python": "/usr/bin/false"}.items():
        (shims / name).write_text(f'#!/bin/sh\nexec {runs} "$@"\n')
        (shims / name).chmod(stat.S_IRWXU)
    # What it says besides need not be UTF-8.
    (shims / "python3").write_text(f"#!/bin/sh\nprintf '\\351' >&2\nexec {PYTHON} \"$@\"\n")
    wrapper = str(shims / "python3")
    assert user_script([wrapper, "train.py"]).interpreter == wrapper
    with pytest.raises(ConfigurationError, match="not the Python of this environment"):
        user_script([str(shims / "python"), "train.py"])


def test_another_python_in_the_same_folder_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("python3.11", "python3"):
        (tmp_path / name).write_text('#!/bin/sh\necho \'["/usr", "2.7"]\'\n')
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3.11"))
    with pytest.raises(ConfigurationError, match="python3, which is not the Python"):
        user_script([str(tmp_path / "python3"), "train.py"])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("python -m own", Path("own.py")),
        ("python train.py -m own", None),
        ("bash -m own", None),
        ("python -m nowhere", None),
    ],
)
def test_the_file_of_a_module_is_that_of_the_interpreters_option(
    words: str, found: Path | None
) -> None:
    Path("own.py").write_text("")
    assert module_file(words.split()) == found


def test_an_environment_need_not_be_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert user_script(["python", "train.py"]).target == "train.py"


def test_a_zip_application_is_none_that_can_be_forked(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("")
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    with pytest.raises(ConfigurationError, match="is a zip application"):
        user_script(["python", str(tmp_path / "app.pyz")])
