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
        with contextlib.suppress(OSError):  # the folder of another host
            Path(stopped).with_name(name).write_text(text)


def has_note(name: str) -> bool:
    """Return whether there is a note of this name."""
    stopped = os.environ.get(STOPPED_VARIABLE)
    return bool(stopped) and Path(str(stopped)).with_name(name).exists()
