"""Import of the log that Horovod's own autotuner writes.

The format follows ``horovod/common/parameter_manager.cc`` of 0.28.1 (``Initialize``,
``LogParameters``, ``LogBestParameters``): a header and a row per sample. If the tuner has finished,
an unmarked last row repeats the best sample. Flags are 0 or 1, the fusion threshold is in MiB, and
the score is bytes per microsecond, the median of five measurements. Horovod before 0.28 has no
column for the torus allreduce.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from hvd_autosync.errors import SpaceError, StoreError, TraceFormatError
from hvd_autosync.search_space import Strategy, Value, catalogue_knob
from hvd_autosync.traces.files import check_regular
from hvd_autosync.traces.records import StudyRecord, StudyStatus, TrialRecord, timestamp
from hvd_autosync.traces.store import TraceStore
from hvd_autosync.util.amounts import amount

_FLAGS = ("hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce", "cache_enabled")
_NUMBERS = ("cycle_time_ms", "tensor_fusion_threshold", "score")
_MIB = 1024 * 1024
_DEFAULT_CACHE_CAPACITY = 1024


@dataclass(frozen=True)
class _Row:
    line: int
    strategy: Strategy
    score: float


def import_autotune_log(store: TraceStore, path: str | os.PathLike[str]) -> str:
    """Import one log as a finished study.

    Each sample becomes a trial without a result, because the log has no step times; its score is
    in the trial's ``info``. If the same log was imported before, nothing is written.

    Returns:
        The study's id, a digest of the log's content.

    Raises:
        TraceFormatError: The file is not a log of Horovod's autotuner; the message names the line.
        StoreError: The file cannot be read, or the store cannot be written.
    """
    name = os.fspath(path)
    try:
        check_regular(path)
        content = Path(path).read_bytes()
        written_at = timestamp(datetime.fromtimestamp(Path(path).stat().st_mtime, timezone.utc))
    except OSError as error:
        raise StoreError(f"cannot read {name}: {error.strerror}", hint="Name a log.") from error
    digest = hashlib.sha256(content).hexdigest()
    study_id = digest[:12]
    if study_id in store.ids():
        return study_id
    study, trials = _records(_read(content, name), study_id, written_at)
    store.add([(study, trials)])
    return study_id


def _records(
    rows: list[_Row], study_id: str, written_at: str
) -> tuple[StudyRecord, list[TrialRecord]]:
    """Return the study and trials of a log with these rows."""
    ended = _ends_with_summary(rows)
    samples = rows[:-1] if ended else rows
    best = max(range(len(samples)), key=lambda index: samples[index].score)
    study = StudyRecord(
        study_id=study_id,
        created_at=written_at,
        job_key=f"horovod-autotune {study_id}",
        command=(),
        settings={
            "origin": "log of Horovod's own autotuner",
            "score": "bytes of gradients reduced per microsecond, not a step time",
            "cache_capacity": "the log only says on or off; on is taken as Horovod's default",
        },
        versions={},
        status=StudyStatus.FINISHED,
        task=None,
        space=None,
        outcome={
            "best_trial": best,
            "best_score_bytes_per_us": samples[best].score,
            "horovod_ended_its_search": ended,
        },
        winner=samples[best].strategy,
    )
    trials = [
        TrialRecord(
            study_id,
            number,
            "horovod-autotune",
            row.strategy,
            written_at,
            None,
            {"score_bytes_per_us": row.score, "line": row.line},
            None,
        )
        for number, row in enumerate(samples)
    ]
    return study, trials


def _ends_with_summary(rows: list[_Row]) -> bool:
    """Return whether the last row repeats the best sample, as the tuner writes at its end."""
    best = max(rows[:-1], key=lambda row: row.score, default=None)
    last = rows[-1]
    return best is not None and (best.strategy, best.score) == (last.strategy, last.score)


def _read(content: bytes, name: str) -> list[_Row]:
    """Return the rows of a log.

    Raises:
        TraceFormatError: The content is not a log of Horovod's autotuner.
    """
    lines = content.decode(errors="replace").splitlines() or [""]
    columns = [column.strip() for column in lines[0].split(",")]
    unknown = set(columns) - {*_FLAGS, *_NUMBERS}
    if unknown or not set(_NUMBERS) <= set(columns) or len(set(columns)) < len(columns):
        raise TraceFormatError(
            f"{name} is not a log of Horovod's autotuner: its first line is {lines[0]!r:.80}",
            hint="Name the file that was given to horovodrun as --autotune-log-file.",
        )
    if len(lines) == 1:
        raise TraceFormatError(
            f"{name} has no samples",
            hint="Let the job run for longer: Horovod's autotuner warms up before it measures.",
        )
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            values = line.split(",")
            if len(values) != len(columns):
                raise ValueError(f"it has {amount(len(values), 'value')} instead of {len(columns)}")
            fields = dict(zip(columns, map(_number, values), strict=True))
            rows.append(_Row(number, _strategy(fields), fields["score"]))
        except (ValueError, SpaceError) as error:
            what = error.message if isinstance(error, SpaceError) else str(error)
            raise TraceFormatError(
                f"{name}, line {number}: {what}",
                hint="Check that the file is whole; nothing was imported.",
            ) from None
    return rows


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text.strip()!r:.60} is not a finite number")
    return value


def _strategy(fields: dict[str, float]) -> Strategy:
    """Return the strategy of one row, with the threshold in bytes, truncated as Horovod does."""
    threshold_bytes = fields["tensor_fusion_threshold"] * _MIB
    if not math.isfinite(threshold_bytes):
        raise ValueError(f"{fields['tensor_fusion_threshold']:g} MiB is too large")
    values: dict[str, Value] = {
        "cycle_time_ms": fields["cycle_time_ms"],
        "fusion_threshold_bytes": int(threshold_bytes),
    }
    for name in _FLAGS:
        if name in fields:
            if fields[name] not in (0, 1):
                raise ValueError(f"{name} is {fields[name]:g} instead of 0 or 1")
            values[name] = bool(fields[name])
    if "cache_enabled" in values:
        values["cache_capacity"] = _DEFAULT_CACHE_CAPACITY if values.pop("cache_enabled") else 0
    for name, value in values.items():
        catalogue_knob(name).validate(value)
    return Strategy(values)
