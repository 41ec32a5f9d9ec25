"""Runs of recurring jobs: records and rows; each function runs in the caller's transaction."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, inspect, select
from sqlalchemy.exc import DBAPIError, IntegrityError

from hvd_autosync.errors import SpaceError, TraceFormatError
from hvd_autosync.search_space import Strategy
from hvd_autosync.search_space.records import OrNan, Real, Record
from hvd_autosync.traces.schema import RUNS, columns_of


@dataclass(frozen=True)
class RunRecord(Record):
    """One run of a recurring job.

    Attributes:
        job_key: Identifies the job.
        number: Its number among the runs of the job, from 0.
        command: The ``horovodrun`` line, without secrets.
        ended_at: ISO 8601 with microseconds, UTC.
        strategy: Its strategy.
        share: Share of its work under BSP.
        metric: Its metric; larger is better. NaN if it failed or diverged.
        source: Source of the metric: ``script``, or ``loss``: the negative of its last training
            losses.
        seconds: Its duration.
        samples: Samples of all ranks together; 0 if they could not be counted.
        status: ``completed``, ``diverged`` or ``failed``.
    """

    job_key: str
    number: int
    command: tuple[str, ...]
    ended_at: str
    strategy: Strategy
    share: Real
    metric: OrNan
    source: str
    seconds: Real
    samples: int
    status: str


#: Number of attempts to insert a run, as another driver may take the same number meanwhile.
_TRIES = 20
_RESULT = ("share", "metric", "source", "seconds", "samples", "status")


def insert_run(connection: Connection, run: RunRecord) -> int:
    """Write a run as the next one of its job, and return its number."""
    # Another process may create the table at this moment, if no lock prevents that.
    with contextlib.suppress(DBAPIError), connection.begin_nested():
        RUNS.create(connection, checkfirst=True)
    query = select(func.max(RUNS.c.number)).where(RUNS.c.job_key == run.job_key)
    row = run.to_json()
    row["result"] = {name: row.pop(name) for name in _RESULT}
    del row["number"]
    number = -1
    for tries_left in reversed(range(_TRIES)):
        last = connection.execute(query).scalar()
        # A transaction of MySQL does not see what others have written meanwhile.
        number = max(number, -1 if last is None else int(last)) + 1
        try:
            with connection.begin_nested():
                connection.execute(RUNS.insert().values(number=number, **row))
            return number
        except IntegrityError:  # another run of the job has ended at this moment
            if not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


def run_records(connection: Connection, job_key: str | None) -> list[RunRecord]:
    """Return the runs of a job, or of all jobs, by job and number.

    Raises:
        TraceFormatError: A run is damaged.
    """
    if not inspect(connection).has_table(RUNS.name):
        return []
    query = select(RUNS).order_by(RUNS.c.job_key, RUNS.c.number)
    if job_key is not None:
        query = query.where(RUNS.c.job_key == job_key)
    return [_record(dict(row)) for row in connection.execute(query).mappings()]


def delete_runs(connection: Connection, job_key: str) -> int:
    """Delete the runs of a job, and return their number."""
    if not inspect(connection).has_table(RUNS.name):
        return 0
    return int(connection.execute(RUNS.delete().where(RUNS.c.job_key == job_key)).rowcount)


def _record(row: dict[str, Any]) -> RunRecord:
    try:
        fields = columns_of(row)
        run = RunRecord.from_json(RunRecord.known({**fields, **fields["result"]}))
        if not 0 <= run.share <= 1:
            raise ValueError(f"share {run.share}")
        return run
    except (TypeError, ValueError, SpaceError) as error:
        raise TraceFormatError(
            f"run {row['number']} of job {row['job_key']} is damaged in the store: {error!r}",
            hint=f"Delete the job's runs: hvd-autosync recurring {row['job_key']} --forget",
        ) from error
