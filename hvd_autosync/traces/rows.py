"""Conversion between records and rows; each function runs in the caller's transaction."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, RowMapping, Text, func, select, type_coerce

from hvd_autosync.errors import AutosyncError, NotOwnerError, StoreError, TraceFormatError
from hvd_autosync.search_space import Task
from hvd_autosync.search_space.records import UnknownFieldError, read
from hvd_autosync.traces.aliases import with_current_keys
from hvd_autosync.traces.owner import HEARTBEAT_LIMIT_S, Owner
from hvd_autosync.traces.records import (
    DRIFT,
    FALLBACKS,
    LATER,
    StudyRecord,
    StudyStatus,
    TrialRecord,
)
from hvd_autosync.traces.schema import STUDIES, STUDY_COLUMNS, TRIALS, columns_of

_Record = TypeVar("_Record", StudyRecord, TrialRecord)
#: Largest number of candidates that the error for an ambiguous id lists.
_LISTED = 8
#: Least number of trials with results of a study that others can learn from.
_FEWEST_TOLD = 3
#: So many known trials are left out of a query: databases limit its parameters, some to 999.
_MOST_LEFT_OUT = 900
_NEWEST_FIRST = (STUDIES.c.created_at.desc(), STUDIES.c.study_id)


def study_ids(connection: Connection) -> list[str]:
    """Return the ids of all studies, newest first."""
    return list(connection.execute(select(STUDIES.c.study_id).order_by(*_NEWEST_FIRST)).scalars())


def study_records(
    connection: Connection,
    *conditions: ColumnElement[bool],
    limit: int | None = None,
    skip_damaged: bool = False,
) -> list[StudyRecord]:
    """Return the studies that meet all ``conditions``, newest first.

    Args:
        connection: In the caller's transaction.
        conditions: The conditions.
        limit: Largest number of studies that are read.
        skip_damaged: Whether damaged ones are left out.

    Raises:
        TraceFormatError: One is damaged.
    """
    query = select(*STUDY_COLUMNS).where(*conditions).order_by(*_NEWEST_FIRST).limit(limit)
    found = []
    for row in connection.execute(query).mappings():
        try:
            found.append(_record(StudyRecord, row))
        except TraceFormatError:
            if not skip_damaged:
                raise
    return found


def finished(
    connection: Connection,
    columns: Mapping[str, str],
    *,
    limit: int | None = None,
    skip_damaged: bool = False,
) -> list[StudyRecord]:
    """Return the finished studies with a winner and these values of columns, newest first.

    Raises:
        TraceFormatError: One is damaged, unless ``skip_damaged``.
    """
    wanted = {"status": StudyStatus.FINISHED.value, **columns}
    conditions = [STUDIES.c[name] == value for name, value in wanted.items()]
    conditions.append(STUDIES.c.winner.is_not(None))
    return study_records(connection, *conditions, limit=limit, skip_damaged=skip_damaged)


def finished_tasks(connection: Connection) -> Iterator[tuple[str, Task]]:
    """Id and task of the largest finished study of each task and space.

    Studies are ordered by the number of trials with results, most first, then newest first.
    Studies with fewer than three are left out: a study that reused a winner has measured the
    default only. Studies with an unreadable task are left out too.
    """
    count = func.count(TRIALS.c.told_at).label("count")
    told = select(TRIALS.c.study_id, count).group_by(TRIALS.c.study_id).subquery()
    query = (
        select(
            STUDIES.c.study_id,
            STUDIES.c.fingerprint,
            STUDIES.c.space_key,
            type_coerce(STUDIES.c.task, Text),
        )
        .join(told, told.c.study_id == STUDIES.c.study_id)
        .where(STUDIES.c.status == StudyStatus.FINISHED.value, STUDIES.c.fingerprint.is_not(None))
        .where(told.c.count >= _FEWEST_TOLD)
        .order_by(told.c.count.desc(), *_NEWEST_FIRST)
    )
    seen = set()
    for study_id, *key, task in connection.execute(query):
        if tuple(key) not in seen:
            with contextlib.suppress(ValueError, AutosyncError):
                yield study_id, Task.from_json(json.loads(task))
                seen.add(tuple(key))


def full_id(connection: Connection, study_id: str, *, or_failed: bool = False) -> str:
    """Return the full id of a study; the study itself may be damaged.

    Args:
        connection: In the caller's transaction.
        study_id: Its id, the beginning of one, or ``"last"`` for the newest study that did not
            fail; if all failed, the newest one.
        or_failed: Whether ``"last"`` is the newest study, failed or not.

    Raises:
        StoreError: No study or several studies match.
    """
    if not study_id:  # the beginning of every id
        raise no_study(connection, study_id)
    query = select(STUDIES.c.study_id).order_by(*_NEWEST_FIRST)
    if study_id == "last":
        failed = STUDIES.c.status == StudyStatus.FAILED.value
        order = _NEWEST_FIRST if or_failed else (failed, *_NEWEST_FIRST)
        query = select(STUDIES.c.study_id).order_by(*order).limit(1)
    else:
        fits = STUDIES.c.study_id.startswith(study_id, autoescape=True)
        query = query.where(fits).limit(_LISTED + 1)
    found: list[str] = list(connection.execute(query).scalars())
    if not found:
        raise no_study(connection, study_id)
    if len(found) > 1:
        ids = ", ".join(found[:_LISTED])
        raise StoreError(
            f"{study_id!r} matches several studies of this store",
            hint=f"Give more digits of one of {ids}{' ...' if len(found) > _LISTED else ''}.",
        )
    return found[0]


def trial_records(
    connection: Connection, study_id: str, known: Collection[int] = ()
) -> list[TrialRecord]:
    """Return the trials of a study by number.

    Args:
        connection: In the caller's transaction.
        study_id: The study.
        known: Numbers of trials that are left out, except perhaps some of many.
    """
    query = select(TRIALS).where(TRIALS.c.study_id == study_id).order_by(TRIALS.c.number)
    if known:
        query = query.where(TRIALS.c.number.not_in(list(islice(known, _MOST_LEFT_OUT))))
    return [_record(TrialRecord, row) for row in connection.execute(query).mappings()]


def trials_by_reason(
    connection: Connection, ending: str
) -> list[tuple[StudyRecord, list[TrialRecord]]]:
    """Return the trials whose reason ends so, with their studies; damaged ones are left out.

    Args:
        connection: In the caller's transaction.
        ending: The last words of the reason, in characters that JSON does not escape.
    """
    result = type_coerce(TRIALS.c.result, Text)
    query = select(TRIALS).where(result.contains(f'{ending}"', autoescape=True))
    found: dict[str, list[TrialRecord]] = {}
    for row in connection.execute(query.order_by(TRIALS.c.number)).mappings():
        with contextlib.suppress(TraceFormatError):
            trial = _record(TrialRecord, row)
            if trial.result is not None and trial.result.reason.endswith(ending):
                found.setdefault(trial.study_id, []).append(trial)
    studies = study_records(connection, STUDIES.c.study_id.in_(found), skip_damaged=True)
    return [(study, found[study.study_id]) for study in studies]


def _record(kind: type[_Record], row: Mapping[Any, Any]) -> _Record:
    try:
        return kind.from_json(with_current_keys(columns_of(row)))
    except (ValueError, AutosyncError) as error:
        raise damaged(row, error) from error


def damaged(row: Mapping[Any, Any], error: Exception) -> TraceFormatError:
    """Return the error for a row of a study or a trial that is no record."""
    if isinstance(error, UnknownFieldError):
        return TraceFormatError(
            f"study {row['study_id']} was written by a newer hvd-autosync: {error}",
            hint="Upgrade hvd-autosync, or use another store.",
        )
    return TraceFormatError(
        f"study {row['study_id']} is damaged in the store: {error}",
        hint=f"Delete it (hvd-autosync traces delete {row['study_id']}), "
        "or restore the store from a copy.",
    )


def add_studies(
    connection: Connection, studies: Sequence[tuple[StudyRecord, Sequence[TrialRecord]]]
) -> list[str]:
    """Write complete studies without an owner; those that are stored already are skipped.

    Of those, what later trainings have reported is added.

    Returns:
        The ids of the new studies.

    Raises:
        StoreError: A different study has the same id.
    """
    added = []
    for study, trials in studies:
        stored = study_records(connection, STUDIES.c.study_id == study.study_id)
        if not stored:
            insert_study(connection, study, trials, owner=None)
            added.append(study.study_id)
        elif _content(stored[0], trial_records(connection, study.study_id)) != _content(
            study, trials
        ):
            raise StoreError(
                f"a different study {study.study_id} is in the store already",
                hint=f"Delete it first: hvd-autosync traces delete {study.study_id}",
            )
        else:
            _add_later(connection, stored[0], study)
    return added


def _add_later(connection: Connection, stored: StudyRecord, other: StudyRecord) -> None:
    """Write to a study what later trainings have reported to another copy of it."""
    here, there = stored.outcome or {}, other.outcome or {}
    fallbacks = list(here.get(FALLBACKS, []))
    fallbacks += [each for each in there.get(FALLBACKS, []) if each not in fallbacks]
    later = {FALLBACKS: fallbacks, DRIFT: here.get(DRIFT) or there.get(DRIFT)}
    outcome = {**here, **{name: entry for name, entry in later.items() if entry}}
    if outcome != here:
        update_study(connection, stored.study_id, {"outcome": outcome})


def _content(study: StudyRecord, trials: Sequence[TrialRecord]) -> list[dict[str, Any]]:
    """Return a study and its trials as JSON for comparison; in JSON, unknown times are equal.

    Reports of later trainings are left out, as another copy may have been made before them.
    """
    outcome = study.outcome and {k: v for k, v in study.outcome.items() if k not in LATER}
    study = replace(study, outcome=outcome)
    return [study.to_json(), *(trial.to_json() for trial in trials)]


def insert_study(
    connection: Connection, study: StudyRecord, trials: Sequence[TrialRecord], owner: Owner | None
) -> None:
    """Write a whole study."""
    task, space = study.task, study.space
    columns = {
        **study.to_json(),
        "fingerprint": None if task is None else task.fingerprint,
        "space_key": None if space is None else space.key,
        **_ownership(owner),
    }
    connection.execute(STUDIES.insert().values(**columns))
    for trial in trials:
        insert_trial(connection, trial)


def insert_trial(connection: Connection, trial: TrialRecord) -> None:
    """Write one trial, with or without a result."""
    connection.execute(TRIALS.insert().values(**trial.to_json()))


def update_study(connection: Connection, study_id: str, columns: Mapping[str, Any]) -> None:
    """Change columns of a study."""
    connection.execute(STUDIES.update().where(STUDIES.c.study_id == study_id).values(**columns))


def next_number(connection: Connection, study_id: str) -> int:
    """Return the number of the study's next trial; the study must be locked."""
    query = select(func.max(TRIALS.c.number)).where(TRIALS.c.study_id == study_id)
    last = connection.execute(query).scalar()
    return 0 if last is None else int(last) + 1


def lock_study(connection: Connection, study_id: str) -> RowMapping:
    """Status and owner of a study; its row is locked until the transaction ends.

    SQLite has no row locks; there the transaction itself excludes other writers. Other columns are
    not read, so that a damaged study can be deleted.

    Raises:
        StoreError: There is no such study.
    """
    columns = STUDIES.c.study_id, STUDIES.c.status, STUDIES.c.owner, STUDIES.c.heartbeat_s
    query = select(*columns).where(STUDIES.c.study_id == study_id).with_for_update()
    row = connection.execute(query).mappings().first()
    if row is None:
        raise no_study(connection, study_id)
    return row


def lock_own(connection: Connection, study_id: str, opener: Owner) -> None:
    """Lock a study that may still change, and that no other driver holds.

    If its owner is dead, ``opener`` becomes its owner; an imported study stays without one.

    Args:
        connection: In the caller's transaction.
        study_id: The study.
        opener: The process that has opened the store. Its forks may change its studies, too.

    Raises:
        StoreError: There is no such study, or it has ended.
        NotOwnerError: Another driver owns it, and runs.
    """
    row = lock_study(connection, study_id)
    if row["status"] != StudyStatus.RUNNING.value:
        raise StoreError(
            f"study {study_id} has ended ({row['status']}) and cannot be changed",
            hint="Start a new study.",
        )
    owner = living_owner(row)
    if owner is not None and owner not in (opener, Owner.current()):
        raise _held_by(study_id, owner)
    if owner is None and row["owner"] is not None:
        # Otherwise a third driver could claim the study while this one measures.
        update_study(connection, study_id, _ownership(opener))


def not_owner(connection: Connection, study_id: str) -> NotOwnerError:
    """Return the error for a study that does not belong to this process."""
    with contextlib.suppress(StoreError):  # it is gone, or its owner is damaged
        owner = living_owner(lock_study(connection, study_id))
        if owner is not None:
            return _held_by(study_id, owner)
    return NotOwnerError(
        f"study {study_id} does not belong to this process",
        hint="It has ended, or another driver has taken it over: stop this process.",
    )


def _held_by(study_id: str, owner: Owner) -> NotOwnerError:
    return NotOwnerError(
        f"study {study_id} does not belong to this process: process {owner.pid} on {owner.host} "
        "has taken it over",
        hint="That driver goes on with it (hvd-autosync watch). Another driver takes a study over "
        f"whose own sends no heartbeat for {HEARTBEAT_LIMIT_S:.0f} s, as where it was suspended "
        "or the store could not be reached.",
    )


def no_study(connection: Connection, study_id: str) -> StoreError:
    """Return the error for an id that matches no study."""
    store = connection.get_execution_options().get("store", "this store")
    if study_id == "last":
        return StoreError(
            f"{store} has no study yet", hint="Run a job with --autosync, or import a trace."
        )
    return StoreError(
        f"{store} has no study {study_id!r}", hint="List the studies with: hvd-autosync traces list"
    )


def living_owner(row: RowMapping) -> Owner | None:
    """Return the owner of a study's row, if it still runs.

    Raises:
        TraceFormatError: The row is damaged.
    """
    if row["owner"] is None:
        return None
    try:
        owner = Owner.from_json(columns_of(row)["owner"])
        age_s = time.time() - read(float, row["heartbeat_s"])
    except ValueError as error:
        raise damaged(row, error) from error
    return owner if owner.alive(age_s) else None


def interrupted(
    connection: Connection, study_id: str | None = None, imported: bool = False
) -> frozenset[str]:
    """Ids of the studies that have not ended and have a dead owner; with an id, of that one alone.

    Args:
        connection: The connection.
        study_id: The only study to look at; ``None``: all.
        imported: Whether to include those that were imported before their end, which have no owner
            and cannot be resumed.

    Raises:
        TraceFormatError: The owner of one of these is damaged.
    """
    query = select(STUDIES.c.study_id, STUDIES.c.owner, STUDIES.c.heartbeat_s)
    if study_id is not None:
        query = query.where(STUDIES.c.study_id == study_id)
    owned, running = STUDIES.c.owner.is_not(None), STUDIES.c.status == StudyStatus.RUNNING.value
    found = connection.execute(query.where(running if imported else owned)).mappings()
    return frozenset(row["study_id"] for row in found if living_owner(row) is None)


def claim_study(connection: Connection, job_key: str) -> StudyRecord | None:
    """Make this process the owner of the job's newest study that has a dead owner."""
    query = (
        select(STUDIES.c.study_id, STUDIES.c.owner, STUDIES.c.heartbeat_s)
        .where(STUDIES.c.job_key == job_key, STUDIES.c.owner.is_not(None))
        .order_by(*_NEWEST_FIRST)
        .with_for_update()
    )
    for row in connection.execute(query).mappings().all():
        if living_owner(row) is None:
            update_study(connection, row["study_id"], _ownership(Owner.current()))
            return study_records(connection, STUDIES.c.study_id == row["study_id"])[0]
    return None


def beat(connection: Connection, study_id: str) -> bool:
    """Renew this process's heartbeat; return false if it does not own the study."""
    owner = Owner.current()
    mine = (STUDIES.c.study_id == study_id) & (STUDIES.c.owner == owner.to_json())
    update = STUDIES.update().where(mine).values(**_ownership(owner))
    return connection.execute(update).rowcount > 0


def let_go(connection: Connection, study_id: str) -> None:
    """Release a study, if this process owns it, so that any driver can claim it."""
    mine = (STUDIES.c.study_id == study_id) & (STUDIES.c.owner == Owner.current().to_json())
    nobody = {"owner": Owner.nobody().to_json(), "heartbeat_s": 0.0}
    connection.execute(STUDIES.update().where(mine).values(**nobody))


def _ownership(owner: Owner | None) -> dict[str, Any]:
    if owner is None:
        return {"owner": None, "heartbeat_s": None}
    return {"owner": owner.to_json(), "heartbeat_s": time.time()}
