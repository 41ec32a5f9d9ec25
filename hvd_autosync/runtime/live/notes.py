"""Notes on a live training: small files in a folder of the flag, or notebook, that started it.

On another host, or without such a folder, nobody reads or writes any.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hvd_autosync.util.variables import STOPPED_VARIABLE


def leave_note(name: str, text: str = "") -> None:
    """Leave a note.

    Args:
        name: Its name, of :mod:`hvd_autosync.util.variables`.
        text: What it says.
    """
    if stopped := os.environ.get(STOPPED_VARIABLE):
        with contextlib.suppress(OSError):  # the folder of another host, or a full disk
            write_note(Path(stopped).with_name(name), text)


def has_note(name: str) -> bool:
    """Return whether there is a note of this name."""
    stopped = os.environ.get(STOPPED_VARIABLE)
    return bool(stopped) and Path(str(stopped)).with_name(name).exists()


def write_note(path: Path, text: str) -> None:
    """Write a note, as a whole or not at all, whatever locale and text are.

    Args:
        path: Its file.
        text: What it says, such as an error with the name of a file that is not valid text.

    Raises:
        OSError: It cannot be written.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8", errors="backslashreplace")
    new.replace(path)


def read_note(path: Path) -> str:
    """Return what a note says; empty if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
