"""The user's command as a Python program that another Python process can run in its own memory."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_autosync.errors import ConfigurationError

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
#: Options of the interpreter that take their value from the next word.
_WITH_VALUE = ("-W", "-X")
#: A module, a command, standard input, or a prompt afterwards.
_NO_SCRIPT = re.compile(r"-(m.*|c.*|i)?$")


@dataclass(frozen=True)
class UserScript:
    """What the user's command runs.

    Attributes:
        interpreter: The command's first word.
        options: Options of the interpreter, before the script.
        target: Path of the script, or name of the module.
        module: Whether ``target`` is a module (``python -m``).
        arguments: Of the script.
    """

    interpreter: str
    options: tuple[str, ...]
    target: str
    module: bool
    arguments: tuple[str, ...]


def user_script(command: Sequence[str]) -> UserScript:
    """Take the user's command apart.

    Raises:
        ConfigurationError: It is not a script or module for this environment's Python; the
            message says what it is instead.
    """
    interpreter, *words = command
    _check_interpreter(interpreter)
    options = _take_options(words)
    if words and words[0].startswith("-"):
        if words[0] == "-m" and len(words) > 1:
            return UserScript(interpreter, tuple(options), words[1], True, tuple(words[2:]))
        raise ConfigurationError(f"python {words[0]} is not a script", hint="Give a script's path.")
    if not words:
        raise ConfigurationError("python is given no script", hint="Give a script's path.")
    if not Path(words[0]).is_file():
        raise ConfigurationError(f"{words[0]!r} is no file here", hint="Give a script's path.")
    return UserScript(interpreter, tuple(options), words[0], False, tuple(words[1:]))


def script_word(command: Sequence[str]) -> str | None:
    """The word of a command that is the path of a Python script, if any is, there or not."""
    interpreter, *words = command
    if not _PYTHON.fullmatch(os.path.basename(interpreter)):
        return None
    _take_options(words)
    return words[0] if words and not words[0].startswith("-") else None


def _take_options(words: list[str]) -> list[str]:
    """Take Python's options off the front, up to what says that there is no script."""
    options: list[str] = []
    while words and words[0].startswith("-") and not _NO_SCRIPT.match(words[0]):
        options.append(words.pop(0))
        if options[-1] in _WITH_VALUE and words:
            options.append(words.pop(0))
    return options


def _check_interpreter(interpreter: str) -> None:
    if not _PYTHON.fullmatch(os.path.basename(interpreter)):
        raise ConfigurationError(
            f"the command starts with {interpreter!r}, not with python",
            hint="Start the script with python.",
        )
    # A virtual environment's Python is a link: the folder tells environments apart.
    found = shutil.which(interpreter)
    own = os.path.dirname(os.path.abspath(sys.executable))
    if found is None or os.path.dirname(os.path.abspath(found)) != own:
        raise ConfigurationError(
            f"{interpreter} is {found or 'not found'}, which is not the Python of this environment",
            hint=f"Use {sys.executable}.",
        )
