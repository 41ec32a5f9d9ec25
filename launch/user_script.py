"""Parses the user's command into a Python script that a forked process can run."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.util.program import search_path

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
#: Options of the interpreter without a value, of which several may share a word.
_FLAGS = "[bBdEhIiOPqRsSuvVx]*"
#: Words of options that take their value from the next word.
_WITH_VALUE = re.compile(rf"-{_FLAGS}[WX]|--check-hash-based-pycs")
#: Words without a script: a module, a command, standard input, or an interactive prompt.
_NO_SCRIPT = re.compile(rf"-({_FLAGS}[mc].*|i)?", re.DOTALL)
_MODULE = re.compile(rf"-({_FLAGS})m")
#: The same, also with the module's name in this word.
_MODULE_NAME = re.compile(rf"-{_FLAGS}m(.*)", re.DOTALL)
#: Of a variable, in front of the command.
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
#: Code that prints the environment and the version of any Python.
_VERSION_CODE = "import json, sys; print(json.dumps([sys.prefix, sys.version]))"
#: Longest time for the answer, possibly from a network file system.
_VERSION_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class UserScript:
    """The parts of the user's command.

    Attributes:
        interpreter: The command's first word.
        options: Options of the interpreter, before the script.
        target: Path of the script, or name of the module.
        module: Whether ``target`` is a module (``python -m``).
        arguments: Arguments of the script.
    """

    interpreter: str
    options: tuple[str, ...]
    target: str
    module: bool
    arguments: tuple[str, ...]


def user_script(command: Sequence[str]) -> UserScript:
    """Parse the user's command.

    Raises:
        ConfigurationError: It does not run a script or module with this environment's Python; the
            message says what it runs instead.
    """
    interpreter, *words = command
    _check_interpreter(interpreter)
    options = _take_options(words)
    if words and words[0].startswith("-"):
        if (module := _MODULE.fullmatch(words[0])) and len(words) > 1:
            options += [f"-{module[1]}"] if module[1] else []
            return UserScript(interpreter, tuple(options), words[1], True, tuple(words[2:]))
        raise ConfigurationError(f"python {words[0]} is not a script", hint="Give a script's path.")
    if not words:
        raise ConfigurationError("python has no script", hint="Give a script's path.")
    if not Path(words[0]).is_file():
        raise ConfigurationError(f"{words[0]!r} is not a file here", hint="Give a script's path.")
    if zipfile.is_zipfile(words[0]):
        raise ConfigurationError(
            f"{words[0]!r} is a zip application", hint="Give the path of a script in plain text."
        )
    return UserScript(interpreter, tuple(options), words[0], False, tuple(words[1:]))


def script_word(command: Sequence[str]) -> str | None:
    """Return the word of a command that is a Python script's path, existing or not, or ``None``."""
    interpreter, *words = command
    if not _PYTHON.fullmatch(os.path.basename(interpreter)):
        return None
    _take_options(words)
    return words[0] if words and not words[0].startswith("-") else None


def module_file(command: Sequence[str]) -> Path | None:
    """Return the file that a command runs by ``python -m``, or ``None``.

    It is looked for in the working directory and ``PYTHONPATH``, where the user's own modules are.
    Nothing is imported.
    """
    words = list(itertools.dropwhile(_ASSIGNMENT.match, command))
    if not words or not _PYTHON.fullmatch(os.path.basename(words.pop(0))):
        return None
    _take_options(words)
    found = _MODULE_NAME.fullmatch(words[0]) if words else None
    name = "" if found is None else found[1] or "".join(words[1:2])
    if not name:
        return None
    for folder in ("", *os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        package = os.path.join(folder, *name.split("."))
        module = f"{package}.py"
        # As in an import, a package precedes a module, and a folder without __init__.py follows it.
        is_package = os.path.isfile(os.path.join(package, "__init__.py"))
        if is_package or not os.path.isfile(module):
            module = os.path.join(package, "__main__.py")
        if os.path.isfile(module):
            return Path(module)
    return None


def _take_options(words: list[str]) -> list[str]:
    """Remove and return Python's options in front, up to one that excludes a script."""
    options: list[str] = []
    while words and words[0].startswith("-") and not _NO_SCRIPT.fullmatch(words[0]):
        options.append(words.pop(0))
        if _WITH_VALUE.fullmatch(options[-1]) and words:
            options.append(words.pop(0))
    return options


def _check_interpreter(interpreter: str) -> None:
    if not _PYTHON.fullmatch(os.path.basename(interpreter)):
        raise ConfigurationError(
            f"the command starts with {interpreter!r}, not with python",
            hint="Start the script with python.",
        )
    found = shutil.which(interpreter, path=search_path())
    if found is None or not (_is_own_link(found) or _environment_of(found) == _own_environment()):
        raise ConfigurationError(
            f"{interpreter} is {found or 'not found'}, which is not the Python of this environment",
            hint=f"Use {sys.executable}.",
        )


def _is_own_link(python: str) -> bool:
    """Return whether ``python`` is this interpreter by another name in the same folder.

    A virtual environment's Python is itself a link, so that only the folder identifies the
    environment, by whatever path it is given.
    """
    folders = [os.path.dirname(os.path.abspath(path)) for path in (python, sys.executable)]
    return os.path.samefile(*folders) and os.path.samefile(python, sys.executable)


def _own_environment() -> tuple[str, str]:
    return os.path.realpath(sys.prefix), sys.version


def _environment_of(python: str) -> tuple[str, str] | None:
    """Run ``python``, which may be a wrapper, for its environment and version."""
    try:
        answer = subprocess.run(
            [python, "-c", _VERSION_CODE],
            capture_output=True,
            text=True,
            errors="surrogateescape",  # as in paths
            timeout=_VERSION_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=True,
        )
        prefix, version = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return os.path.realpath(prefix), version
