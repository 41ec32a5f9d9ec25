"""``hvd-autosync watch``: the progress of a study, from another terminal."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import typer

from hvd_autosync.commands.common import StoreOption, StudyArgument, open_store
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hvd_autosync.traces import TraceStore
    from hvd_autosync.traces.state import StudyState

#: Interval between two looks into the store.
_EVERY_S = 1.0


def add_command(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(watch)


def watch(study: StudyArgument = "last", store: StoreOption = None) -> None:
    """Print the trials of a study as they end, until the study ends; Ctrl-C stops watching.

    It ends, too, where the study was interrupted: no process has run it for 20 seconds (140 seconds
    if it ran on another machine or in another container), or it was imported before its end.

    The study may run anywhere that writes to the same store: under the flag, in a notebook, or in
    the steps of a training (HVD_AUTOSYNC_LIVE=1). Watching changes nothing.
    """
    traces = open_store(store)
    try:
        for line in watched(traces, traces.full_id(study, or_failed=True)):
            print(printable(line), flush=True)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def watched(store: TraceStore, study_id: str, every_s: float = _EVERY_S) -> Iterator[str]:
    """Yield lines about a study: those so far, then each as it comes, until none can come.

    Args:
        store: The store.
        study_id: The study.
        every_s: Seconds between two looks.
    """
    from hvd_autosync.reporting import answer_line
    from hvd_autosync.reporting.plain import trial_line
    from hvd_autosync.reporting.tuning_progress import TuningProgress
    from hvd_autosync.study.study import AskTellStudy
    from hvd_autosync.traces import StudyStatus
    from hvd_autosync.traces.owner import HEARTBEAT_S

    study = AskTellStudy(store, store.study(study_id))
    yield f"study {study_id}: {' '.join(study.record.command)}"
    printed: set[int] = set()
    seen: StudyState | None = None
    dead_since = math.inf
    while True:
        now = time.monotonic()
        # A driver elsewhere that was silent for long may still beat, so one look is not enough. The
        # look is before its trials: none comes later.
        dead = study_id in store.interrupted(study_id, imported=True)
        dead_since = min(dead_since, now) if dead else math.inf
        state = store.state(study_id)
        if state != seen:
            seen = state
            study.record, progress = store.study(study_id), TuningProgress()
            progress.start(study)
            for ended in progress.ended:  # not always in the order of their numbers
                if ended.number not in printed:
                    printed.add(ended.number)
                    yield trial_line(ended)
            if study.record.status is not StudyStatus.RUNNING:
                yield answer_line(study.record)
                return
        if now - dead_since > HEARTBEAT_S:
            count = amount(len(printed), "trial")
            again = study_id in store.interrupted(study_id)
            hint = "run its command again to resume" if again else "it was imported before its end"
            yield f"study {study_id} was interrupted after {count}: {hint}"
            return
        time.sleep(every_s)
