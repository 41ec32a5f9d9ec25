"""Outcomes of studies: their end, and what later trainings report.

Each function runs in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from hvd_autosync.errors import StoreError
from hvd_autosync.search_space import Strategy
from hvd_autosync.traces import rows
from hvd_autosync.traces.owner import Owner
from hvd_autosync.traces.records import (
    DRIFT,
    FALLBACKS,
    Fallback,
    StudyRecord,
    StudyStatus,
    timestamp,
)
from hvd_autosync.traces.schema import STUDIES


def finish_study(
    connection: Connection,
    study_id: str,
    opener: Owner,
    status: StudyStatus,
    outcome: Mapping[str, Any],
    winner: Strategy | None,
) -> None:
    """End a study.

    Args:
        connection: In the caller's transaction.
        study_id: The study.
        opener: As of :func:`hvd_autosync.traces.rows.lock_own`.
        status: Its final state.
        outcome: Its outcome.
        winner: The strategy to train with, if there is one.

    Raises:
        StoreError: The study has ended already, or ``status`` is not a final one.
        NotOwnerError: Another driver owns it, and runs.
    """
    if status is StudyStatus.RUNNING:
        raise StoreError(
            f"study {study_id} cannot end as {status.value}", hint="End it as finished or failed."
        )
    rows.lock_own(connection, study_id, opener)
    # A training may have run already, if the tuning was interrupted; the last trials came after any
    # drift of its steps.
    study = _study(connection, study_id)
    kept = {k: v for k, v in (study.outcome or {}).items() if k == FALLBACKS}
    columns = {
        "status": status.value,
        "owner": None,
        "heartbeat_s": None,
        "winner": None if winner is None else dict(winner),
        "outcome": {**kept, **outcome},
    }
    rows.update_study(connection, study_id, columns)


def add_drift(connection: Connection, study_id: str, reports: Sequence[str]) -> None:
    """Write the drift of a training, in place of earlier reports.

    Raises:
        StoreError: There is no such study.
    """
    _add(connection, study_id, DRIFT, lambda study: list(reports))


def add_fallback(connection: Connection, study_id: str, fallback: Fallback) -> None:
    """Write a fallback of the loss guard after earlier ones; its time is set to now.

    Raises:
        StoreError: There is no such study.
    """
    now = replace(fallback, at=timestamp())

    def add(study: StudyRecord) -> list[Any]:
        return [each.to_json() for each in (*study.fallbacks, now)]

    _add(connection, study_id, FALLBACKS, add)


def _add(
    connection: Connection, study_id: str, name: str, entry: Callable[[StudyRecord], list[Any]]
) -> None:
    """Set an entry of a study's outcome to ``entry`` of the current study."""
    rows.lock_study(connection, study_id)
    study = _study(connection, study_id)
    outcome = {**(study.outcome or {}), name: entry(study)}
    rows.update_study(connection, study_id, {"outcome": outcome})


def _study(connection: Connection, study_id: str) -> StudyRecord:
    (study,) = rows.study_records(connection, STUDIES.c.study_id == study_id, limit=1)
    return study
