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
    options: list[str] = []
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "-m" and words:
            return UserScript(interpreter, tuple(options), words[0], True, tuple(words[1:]))
        if word in ("-", "-c", "-m", "-i"):
            raise ConfigurationError(f"python {word} is not a script", hint="Give a script's path.")
        options.append(word)
        if word in _WITH_VALUE and words:
            options.append(words.pop(0))
    if not words:
        raise ConfigurationError("python is given no script", hint="Give a script's path.")
    if not Path(words[0]).is_file():
        raise ConfigurationError(f"{words[0]!r} is no file here", hint="Give a script's path.")
    return UserScript(interpreter, tuple(options), words[0], False, tuple(words[1:]))


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
