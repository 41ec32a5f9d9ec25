"""Functions as jobs: written here, called there."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.function import function_command


def make_writer(word: str) -> object:
    def write(path: str, *, times: int = 1) -> None:
        Path(path).write_text(word * times)

    return write


def test_a_function_is_called_with_its_arguments_elsewhere(tmp_path: Path) -> None:
    said = tmp_path / "said"
    command = function_command(make_writer("ho"), [str(said)], {"times": 3}, tmp_path / "kept")  # type: ignore[arg-type]
    assert command[0] == sys.executable
    subprocess.run(command, check=True)
    assert said.read_text() == "hohoho"


def test_the_same_call_is_the_same_command(tmp_path: Path) -> None:
    write = make_writer("a")
    one, again, other = (
        function_command(write, [str(path)], {}, tmp_path)  # type: ignore[arg-type]
        for path in ("x", "x", "y")
    )
    assert one == again != other
    assert "write-" in one[-1] and (Path(one[-1]).stat().st_mode & 0o077) == 0


#: Prints the command of a function that was defined in a cell of a notebook.
_KERNEL = """
import __main__, os, sys
from hvd_autosync.launch.function import function_command
code = compile(sys.argv[1], f"/tmp/ipykernel_{os.getpid()}/1.py", "exec")
exec(code, vars(__main__))
print(function_command(train, (), {"names": {"x", "yy", "zzz"}}, sys.argv[2])[-1])
"""
_CELL = """
KINDS = {"a", "bb", "ccc"}

class Net:
    sizes = frozenset({"one", "two", "three"})

class Wide(Net):
    pass

def train(names):
    return [(Wide().sizes, 0.1) for kind in KINDS if kind in {"aa", "b", "ccc"}]
"""


def test_a_function_of_a_notebook_is_the_same_job_in_each_kernel(tmp_path: Path) -> None:
    """Each has another order of sets, and other numbers of classes."""

    def command(cell: str) -> str:
        words = [sys.executable, "-c", _KERNEL, cell, str(tmp_path)]
        return subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE).stdout

    first = command(_CELL)
    assert command(_CELL) == first
    for old, new in (("0.1", "0.2"), ("two", "six"), ('"bb"', '"dd"'), ("Wide()", "Net()")):
        assert command(_CELL.replace(old, new)) != first


def test_a_function_of_a_module_is_another_job_after_an_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is pickled by its name, and the ranks import what the file contains then."""
    module = tmp_path / "edited_training.py"
    module.write_text("def train(steps):\n    return steps\n")
    monkeypatch.syspath_prepend(tmp_path)
    train = importlib.import_module("edited_training").train
    commands = [
        function_command(each, (), {}, tmp_path)
        for each in (train, train, functools.partial(train, 3))
    ]
    assert commands[0] == commands[1] != commands[2]
    module.write_text("def train(steps):\n    return steps + 1\n")
    edited = [
        function_command(each, (), {}, tmp_path) for each in (train, functools.partial(train, 3))
    ]
    assert edited[0] != commands[0] and edited[1] != commands[2]


def test_functions_that_cannot_be_sent_are_refused(tmp_path: Path) -> None:
    lock = threading.Lock()

    def train() -> None:
        lock.acquire()

    with pytest.raises(ConfigurationError, match="the function train cannot be sent"):
        function_command(train, (), {}, tmp_path)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "full").touch()
    with pytest.raises(ConfigurationError, match="the function print cannot be written to") as said:
        function_command(print, (), {}, tmp_path / "full" / "functions")
    assert "XDG_DATA_HOME" in said.value.hint and str(tmp_path) in said.value.message


def test_a_host_without_the_file_says_so(tmp_path: Path) -> None:
    command = function_command(make_writer("a"), ["x"], {}, tmp_path)  # type: ignore[arg-type]
    Path(command[-1]).unlink()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Share the user's data folder" in done.stderr
    assert "Traceback" not in done.stderr
