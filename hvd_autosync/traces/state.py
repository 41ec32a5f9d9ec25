"""How far a study has come: what those look at first who wait for news of it."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from hvd_autosync.traces import rows
from hvd_autosync.traces.records import StudyStatus
from hvd_autosync.traces.schema import STUDIES, TRIALS


@dataclass(frozen=True)
class StudyState:
    """How far a study has come, read without its records.

    As long as it is the same, nothing of the tuning is new in the study's record and trials.

    Attributes:
        status: Its state.
        described: Whether its search space is known.
        asked: Number of its trials.
        told: Number of its trials with results.
    """

    status: StudyStatus
    described: bool
    asked: int
    told: int


def study_state(connection: Connection, study_id: str) -> StudyState:
    """Return how far a study has come, in the caller's transaction.

    Raises:
        StoreError: There is no such study.
        TraceFormatError: It is damaged.
    """
    own = TRIALS.c.study_id == study_id
    query = select(
        STUDIES.c.study_id,
        STUDIES.c.status,
        STUDIES.c.space_key,
        select(func.count()).select_from(TRIALS).where(own).scalar_subquery().label("asked"),
        select(func.count(TRIALS.c.told_at)).where(own).scalar_subquery().label("told"),
    ).where(STUDIES.c.study_id == study_id)
    row = connection.execute(query).mappings().first()
    if row is None:
        raise rows.no_study(connection, study_id)
    try:
        status = StudyStatus(row["status"])
    except ValueError as error:
        raise rows.damaged(row, error) from error
    return StudyState(status, row["space_key"] is not None, row["asked"], row["told"])
