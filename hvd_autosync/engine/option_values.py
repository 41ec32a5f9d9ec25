"""The names of options, and from their words to their values.

Every parser raises ``ValueError`` that says what a value must be.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from os.path import expanduser

from hvd_autosync.search_space.knobs import LOSSY_GROUPS
from hvd_autosync.util.variables import is_on

#: Variables of this package begin so.
PREFIX = "HVD_AUTOSYNC_"
#: URLs of SQLite databases in memory.
_IN_MEMORY = re.compile(r"sqlite(\+\w+)?:///?(:memory:)?(\?.*)?")


def option_name(name: str) -> str:
    """``--autosync-tune-only`` for ``tune_only``."""
    return f"--autosync-{name.replace('_', '-')}"


def variable_name(name: str) -> str:
    """``HVD_AUTOSYNC_TUNE_ONLY`` for ``tune_only``."""
    return f"{PREFIX}{name.upper()}"


def at_least(minimum: int, below: float = math.inf) -> Callable[[str], int]:
    """Return a parser of integers of ``minimum`` and more, below a limit."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("must be an integer") from None
        if value < minimum:
            raise ValueError(f"must be at least {minimum}")
        if value >= below:
            raise ValueError(f"must be less than {below}")
        return value

    return parse


def positive(text: str) -> float:
    """Return a finite number above 0."""
    value = number(text)
    if value <= 0:
        raise ValueError("must be greater than 0")
    return value


def number(text: str) -> float:
    """Return a finite number."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("must be a number") from None
    if not float("-inf") < value < float("inf"):
        raise ValueError("must be a finite number")
    return value


def lossy_groups(text: str) -> tuple[str, ...]:
    """Return the names of lossy groups in order, from words with commas."""
    groups = tuple(sorted({word.strip() for word in text.split(",") if word.strip()}))
    for group in groups:
        if group not in LOSSY_GROUPS:
            raise ValueError(f"{group!r} is not one of {', '.join(LOSSY_GROUPS)}")
    return groups


def one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    """Return a parser of one of some words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def switch(text: str) -> bool:
    """Return whether a switch is on."""
    if text.lower() not in ("0", "1", "true", "false", "yes", "no", "on", "off"):
        raise ValueError("must be 1 or 0")
    return is_on(text)


def file_path(text: str) -> str:
    """Return a path, in which ``~`` is the home folder."""
    if not text or "\0" in text:
        raise ValueError("must be a path")
    return expanduser(text)  # noqa: PTH111 (an unknown user is no error)


def folder(text: str) -> str:
    """Return the path of a folder, which need not exist; ``~`` is the home folder."""
    path = file_path(text)
    if os.path.lexists(path) and not os.path.isdir(path):  # noqa: PTH112
        raise ValueError("must be a folder, or a path that does not exist yet")
    return path


def store_location(text: str) -> str:
    """Return the location of a store, which outlives the process; ``~`` is the home folder."""
    if _IN_MEMORY.fullmatch(text):
        raise ValueError("a store in memory is lost; name a file")
    if "\0" in text:
        raise ValueError("must be a path or a URL")
    return expanduser(text)  # noqa: PTH111 (a URL is no path, and an unknown user no error)
