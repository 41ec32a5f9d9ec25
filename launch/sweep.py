"""Finds and ends the left-over processes of a trial on this host.

Every process of a trial has the trial's name in its environment. On other hosts this module runs as
a program with the trial's name as its argument.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hvd_autosync.launch.stage import remove_stages
from hvd_autosync.runtime.driver.environment import TRIAL_ID_VARIABLE
from hvd_autosync.search_space.horovod_settings import RANK_VARIABLES
from hvd_autosync.search_space.trial import TRAINING

_PATIENCE_S = 10.0
#: A process that starts a program at this moment has no environment: so often none may be seen.
_LOOKS = 2
#: How long a tracker of Python's, which removes semaphores that killed processes have left, may
#: take to end by itself. Its Python may be about to start, on a busy machine.
_TRACKER_S = 5.0
_TRACKER = b"multiprocessing.resource_tracker"
#: Horovod's launcher gives its processes five seconds to end (``safe_shell_exec.py``).
_TERMINATE_S = 8.0


def processes_of(trial_id: str, *, launcher: int | None = None) -> list[int]:
    """Return the ids of a trial's running processes on this host, except this process.

    Args:
        trial_id: The trial's name.
        launcher: Id of the launcher, if only the ranks are wanted. It has no rank of the job, but
            may have one of a batch system.
    """
    mark = f"{TRIAL_ID_VARIABLE}={trial_id}".encode()
    ranks = tuple(f"{name}=".encode() for name in RANK_VARIABLES)
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(folder.name)
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # ended, or another user's process
            continue
        if launcher is not None and (
            pid == launcher or not any(entry.startswith(ranks) for entry in environment)
        ):
            continue
        if mark in environment and pid != os.getpid() and not _is_zombie(folder):
            found.append(pid)
    return found


def await_trials_in(folder: str, patience_s: float) -> None:
    """Wait for the end of all trials' processes on this host that run in a folder.

    Args:
        folder: Their working directory, as a real path.
        patience_s: Longest wait, seconds.
    """
    deadline = time.monotonic() + patience_s
    while _runs_in(folder) and time.monotonic() < deadline:
        time.sleep(0.1)


def _runs_in(folder: str) -> bool:
    mark = f"{TRIAL_ID_VARIABLE}=".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended, or another user's process
            if os.readlink(process / "cwd") != folder or process.name == str(os.getpid()):
                continue
            environment = (process / "environ").read_bytes().split(b"\0")
            trials = {each for each in environment if each.startswith(mark)}
            if trials - {mark + TRAINING.encode()} and not _is_zombie(process):
                return True
    return False


def _is_zombie(folder: Path) -> bool:
    try:
        # The name in parentheses is any bytes, such as half a character.
        return (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


def end_launch(process: subprocess.Popen[bytes], trial_id: str) -> None:
    """End a launch with all its processes on this host.

    The launcher gets SIGTERM, and its ranks, which may be stuck, are killed so that it can end. A
    launcher that is killed itself leaves its semaphores in shared memory.

    Args:
        process: The launcher, which leads a session.
        trial_id: The trial id in the environment of its processes.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        sweep(trial_id, launcher=process.pid)
        try:
            process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    sweep(trial_id)
    process.wait()


def sweep(trial_id: str, *, launcher: int | None = None) -> int:
    """Kill a trial's left-over processes on this host and wait for their end.

    Args:
        trial_id: The trial's name.
        launcher: Id of the launcher, if only the ranks are killed.

    Returns:
        The number of processes that were found.
    """
    killed: set[int] = set()
    began = time.monotonic()
    deadline = began + _PATIENCE_S
    looks = 0
    while looks < _LOOKS and time.monotonic() < deadline:
        alive = processes_of(trial_id, launcher=launcher)
        looks = 0 if alive else looks + 1
        for pid in alive:
            if time.monotonic() < began + _TRACKER_S and _is_tracker(pid):
                continue
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    if launcher is None:
        remove_stages(trial_id)
    return len(killed)


def _is_tracker(pid: int) -> bool:
    """Return whether a process tracks resources; it ends when those who use them have ended."""
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def main() -> None:
    """Sweep this host."""
    print(sweep(sys.argv[1]))
