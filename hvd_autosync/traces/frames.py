"""Trials as a table for notebooks; the only module of this folder that needs pandas."""

from __future__ import annotations

import math
import os
from typing import Any

import pandas as pd

from hvd_autosync.search_space import Value
from hvd_autosync.traces.jsonl import import_studies
from hvd_autosync.traces.records import TrialRecord
from hvd_autosync.traces.speedups import speedups
from hvd_autosync.traces.store import TraceStore

_COLUMNS = (
    "number",
    "kind",
    "status",
    "step_ms",
    "step_ms_error",
    "steps",
    "steps_per_s",
    "speedup",
    "blocked_share",
    "setup_s",
    "total_s",
    "reason",
)
_DTYPES = {bool: "boolean", int: "Int64", float: "float64", str: "string"}


def frame_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as values of JSON; ``None``: missing, or no number."""
    rows = frame.astype(object).to_dict("records")
    return [{str(name): _plain(value) for name, value in row.items()} for row in rows]


def _plain(value: object) -> object:
    is_none = value is pd.NA or (isinstance(value, float) and not math.isfinite(value))
    return None if is_none else value


def trials_frame(store: TraceStore, study_id: str) -> pd.DataFrame:
    """One row per trial of a study, in order.

    Args:
        store: The store that contains the study.
        study_id: Its id, the beginning of one, or ``"last"``.

    Returns:
        Columns ``number``; ``kind``; ``status`` (missing without a result); ``step_ms`` and
        ``step_ms_error``, mean and standard error of the step time in milliseconds; ``steps``,
        the number of measured steps; ``steps_per_s``; ``speedup`` over the last default
        before it; ``blocked_share``, the share of the measured time that was blocked;
        ``setup_s`` and ``total_s``, seconds; ``reason``; then one column per knob, missing if the
        strategy does not set it. A knob that is named like one of these has ``(knob)`` behind its
        name.

    Raises:
        StoreError: There is no such study.
    """
    study = store.study(study_id)
    trials = store.trials(study.study_id)
    compared = speedups(study, trials)
    measures = [_measures(*pair) for pair in zip(trials, compared, strict=True)]
    names = [] if study.space is None else [knob.name for knob in study.space.knobs]
    names += sorted({name for trial in trials for name in trial.strategy} - set(names))
    frame: pd.DataFrame = pd.DataFrame(measures, columns=list(_COLUMNS))
    frame["steps"] = frame["steps"].astype("Int64")
    for name in names:
        column = f"{name} (knob)" if name in (*_COLUMNS, "study") else name
        frame[column] = _knob_column([trial.strategy.get(name) for trial in trials])
    return frame


def read_trials(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Return the trials of a trace file as one table.

    Args:
        path: A file that ``hvd-autosync traces export`` or ``contribute`` wrote.

    Returns:
        The columns of :func:`trials_frame`, after a first column ``study``.

    Raises:
        TraceFormatError: The file is damaged, of a newer version, or not a trace.
        StoreError: The file cannot be read.
    """
    store = TraceStore("sqlite://")
    frames = []
    for study_id in import_studies(store, path):
        frame = trials_frame(store, study_id)
        frame.insert(0, "study", study_id)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _knob_column(values: list[Value | None]) -> pd.Series[Any]:
    """Return a column that keeps the type of its values even if some are missing."""
    types = {type(value) for value in values if value is not None}
    return pd.Series(values, dtype=_DTYPES[types.pop()] if len(types) == 1 else "object")


def _measures(trial: TrialRecord, speedup: float) -> dict[str, Any]:
    """Return the fixed columns of one row; entries missing here are missing in the table."""
    row: dict[str, Any] = {"number": trial.number, "kind": trial.kind}
    result, step_time = trial.result, trial.step_time
    if result is not None:
        row |= {
            "status": result.status.value,
            "blocked_share": result.blocked_share,
            "setup_s": result.setup_s,
            "total_s": result.total_s,
            "reason": result.reason,
        }
    if step_time is not None:
        row |= {
            "step_ms": 1e3 * step_time.mean_s,
            "step_ms_error": 1e3 * step_time.standard_error_s,
            "steps": step_time.steps,
            "steps_per_s": 1 / step_time.mean_s,
        }
        if math.isfinite(speedup):
            row["speedup"] = speedup
    return row
