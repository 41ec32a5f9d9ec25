"""The empty folder at which a trial's private files are mounted while they are being made.

Only the rank that makes them sees what is there, for a few hundredths of a second. A rank that is
killed meanwhile leaves it, so whoever ends a trial's processes removes it after them.
"""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile

_PREFIX = "hvd-autosync-files-"


def make_stage(trial_id: str) -> str:
    """Make it, in the folder for temporary files.

    Args:
        trial_id: What the trial's processes have in their environment.
    """
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{trial_id}-")


def remove_stages(trial_id: str) -> None:
    """Remove what is left of them on this host when no process of the trial makes one any more."""
    path = os.path.join(tempfile.gettempdir(), f"{_PREFIX}{trial_id}-")
    for stage in glob.glob(glob.escape(path) + "*"):
        with contextlib.suppress(OSError):  # another one was faster
            os.rmdir(stage)
