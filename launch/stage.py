"""The empty folder at which a trial's private file system is mounted while it is built.

Only the rank that builds it sees the mount, for a few hundredths of a second. A rank that is killed
meanwhile leaves the folder, so it is removed after the trial's processes have been ended.
"""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile

_PREFIX = "hvd-autosync-files-"
#: Folder of a trial's overlays; beside it kept files lie at their own paths.
LAYERS = ".hvd-autosync-layers"


def make_stage(trial_id: str) -> str:
    """Create the folder among the temporary files and return its path.

    Args:
        trial_id: The trial id in the environment of the trial's processes.
    """
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{trial_id}-")


def remove_stages(trial_id: str) -> None:
    """Remove a trial's left-over folders on this host, after its processes have ended."""
    try:
        path = os.path.join(tempfile.gettempdir(), f"{_PREFIX}{trial_id}-")
    except OSError:  # there is no such folder that can be written, so nothing was left in it
        return
    for stage in glob.glob(glob.escape(path) + "*"):
        with contextlib.suppress(OSError):  # another process was faster
            os.rmdir(stage)
