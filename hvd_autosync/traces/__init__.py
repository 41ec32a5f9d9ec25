"""Traces: the saved record of every study, enough to resume, compare and replay it.

A study is created in a :class:`TraceStore`, each trial is written down when it is asked and again
when it is told, and in the end the outcome. Whole studies travel as JSON Lines files, trials
become tables for notebooks, and the logs of Horovod's own autotuner can be brought in.
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
