"""Traces: the saved record of every study, enough to resume, compare and replay it.

A :class:`TraceStore` records each study, each trial when it is asked for and when it ends, and the
outcome. Studies can be exported to and imported from JSON Lines files, trials are available as
tables, and logs of Horovod's own autotuner can be imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_autosync.traces.autotune_csv import import_autotune_log
from hvd_autosync.traces.jsonl import export_study, import_studies
from hvd_autosync.traces.records import (
    Fallback,
    StudyRecord,
    StudyStatus,
    TrialRecord,
    default_result,
)
from hvd_autosync.traces.store import TraceStore, default_store_url

if TYPE_CHECKING:
    from hvd_autosync.traces.frames import read_trials, trials_frame

__all__ = [
    "Fallback",
    "StudyRecord",
    "StudyStatus",
    "TraceStore",
    "TrialRecord",
    "default_result",
    "default_store_url",
    "export_study",
    "import_autotune_log",
    "import_studies",
    "read_trials",
    "trials_frame",
]


def __getattr__(name: str) -> Any:
    if name in ("read_trials", "trials_frame"):  # pandas is slow to import
        from hvd_autosync.traces import frames

        return getattr(frames, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
