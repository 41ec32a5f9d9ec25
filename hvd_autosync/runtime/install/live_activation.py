"""Activates live tuning right after ``horovod.torch`` was imported in a rank."""

from __future__ import annotations

import os

from hvd_autosync import extensions
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.initialization import record_initialization
from hvd_autosync.runtime.install.activation import replace_optimizer
from hvd_autosync.runtime.live.helper import Helper
from hvd_autosync.runtime.live.live_tuning import LiveTuning
from hvd_autosync.runtime.live.notes import leave_note
from hvd_autosync.runtime.patches.backward import watch_backward
from hvd_autosync.runtime.patches.evaluation import watch_evaluation
from hvd_autosync.runtime.patches.exits import watch_failed_operations
from hvd_autosync.search_space.horovod_settings import AUTOTUNE_VARIABLE, RANK_VARIABLES, is_elastic
from hvd_autosync.search_space.sync_plan import SyncPlan
from hvd_autosync.util.log import log_level
from hvd_autosync.util.print_line import print_line
from hvd_autosync.util.variables import (
    BEGUN_NOTE,
    FOLDER_VARIABLE,
    LIVE_VARIABLE,
    REFUSAL_VARIABLE,
    TUNING_ENDED_NOTE,
    is_on,
)


def activate_live(folder: str) -> None:
    """Let the training that begins be tuned; on rank 0, start the helper process.

    Args:
        folder: Working directory at the start of this process; empty if there was none.
    """
    # Processes that the script starts are no ranks.
    if not is_on(os.environ.pop(LIVE_VARIABLE, "")):
        return
    refusal = os.environ.pop(REFUSAL_VARIABLE, "")
    # A wrapper may have changed it since the flag.
    folder = os.environ.pop(FOLDER_VARIABLE, folder)
    first = next((os.environ[v] for v in RANK_VARIABLES if v in os.environ), "") == "0"
    elastic = is_elastic(os.environ)  # which rank a process is, hvd.init() decides
    reason = _why_not()
    if first:
        leave_note(BEGUN_NOTE)
    helper = _start_helper(folder) if first and not reason and not elastic else None
    if reason:
        if first:
            print_line(f"this training is not tuned: {reason}")
            leave_note(TUNING_ENDED_NOTE, f"this training is not tuned: {reason}")
        return
    extensions.load()
    record_initialization()
    current.sync_plan = current.sync_plan or SyncPlan()
    replace_optimizer()
    current.live = live = LiveTuning(helper, refusal)
    if elastic:
        from hvd_autosync.runtime.live.elastic import ElasticTuning  # few jobs need it

        ElasticTuning(live, lambda: _start_helper(folder)).watch()
    current.losses = live.losses  # a loss guard watches them
    os.register_at_fork(after_in_child=current.forget_run)
    watch_backward(live.losses, lambda: live.profiling.profiler)
    watch_evaluation(live.unlike_others)
    watch_failed_operations()


def _start_helper(folder: str) -> Helper | None:
    """Start the helper of rank 0; ``None`` if that fails.

    The other ranks have no word of it yet; they learn it at the first boundary.
    """
    try:
        log_level()  # the helper has this environment
        return Helper.start(folder)
    except (OSError, ValueError) as error:
        print_line(
            f"this training is not tuned, as the process that tunes cannot be started: {error}"
        )
        return None


def _why_not() -> str:
    """Return why no rank of this job can be tuned; empty if they can."""
    if os.environ.get(AUTOTUNE_VARIABLE, "0") not in ("", "0"):
        return f"{AUTOTUNE_VARIABLE} is set: Horovod's own tuner would change what is measured"
    return ""
