"""Notes of rank 0 to the flag that has started the training: empty files in a folder of the flag's.

The flag reads them once the training has ended. On another host, or without the flag, nobody does.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hvd_autosync.util.variables import STOPPED_VARIABLE


def leave_note(name: str) -> None:
    """Leave a note.

    Args:
        name: Its name, of :mod:`hvd_autosync.util.variables`.
    """
    if stopped := os.environ.get(STOPPED_VARIABLE):
        with contextlib.suppress(OSError):  # the folder of another host
            Path(stopped).with_name(name).touch()
