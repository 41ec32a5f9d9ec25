"""Find and end the processes that a trial left behind on this host.

Every process of a trial has the trial's name in its environment. As a command, for other hosts:
``python -m hvd_autosync.launch.sweep NAME``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from hvd_autosync.launch.worker_environment import TRIAL_ID_VARIABLE

_PATIENCE_S = 5.0


def processes_of(trial_id: str) -> list[int]:
    """Ids of the living processes of a trial on this host, this process left out."""
    mark = f"{TRIAL_ID_VARIABLE}={trial_id}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(folder.name)
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or another user's
            continue
        if mark in environment and pid != os.getpid() and not _is_zombie(folder):
            found.append(pid)
    return found


def _is_zombie(folder: Path) -> bool:
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def sweep(trial_id: str) -> int:
    """Kill what is left of a trial on this host and wait until it is gone.

    Returns:
        How many processes were found.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _PATIENCE_S
    while (alive := processes_of(trial_id)) and time.monotonic() < deadline:
        for pid in alive:
            killed.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)
    return len(killed)


if __name__ == "__main__":
    print(sweep(sys.argv[1]))
