from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from sqlalchemy import Connection, create_engine, select, text, update
from sqlalchemy.dialects import postgresql

from hvd_autosync.errors import StoreError, TraceFormatError
from hvd_autosync.search_space import SearchSpace, Strategy, Task
from hvd_autosync.traces import StudyRecord, StudyStatus, TrialRecord, rows
from hvd_autosync.traces.owner import Owner
from hvd_autosync.traces.records import timestamp
from hvd_autosync.traces.schema import STUDIES, create_tables

_ID = "0123456789ab"


@pytest.fixture
def connection() -> Iterator[Connection]:
    with create_engine("sqlite://").connect() as connection:
        create_tables(connection)
        yield connection


def _study(
    task: Task | None = None, space: SearchSpace | None = None, study_id: str = _ID
) -> StudyRecord:
    return StudyRecord(
        study_id, timestamp(), "job", (), {}, {}, StudyStatus.RUNNING, task, space, None, None
    )


def test_whole_studies_are_written_and_read(
    connection: Connection, task: Task, space: SearchSpace
) -> None:
    study = _study(task, space)
    trials = [
        TrialRecord(_ID, number, "sobol", Strategy(), timestamp(), None, {}, None)
        for number in (1, 0)
    ]
    rows.insert_study(connection, study, trials, None)
    (again,) = rows.study_records(connection)
    assert again.to_json() == study.to_json()
    assert [t.number for t in rows.trial_records(connection, _ID)] == [0, 1]
    assert rows.next_number(connection, _ID) == 2
    row = connection.execute(select(STUDIES.c.fingerprint, STUDIES.c.space_key)).one()
    assert tuple(row) == (task.fingerprint, space.key)


def test_settings_of_earlier_versions_are_read(connection: Connection) -> None:
    rows.insert_study(connection, replace(_study(), settings={"left": [], "seed": 3}), (), None)
    (study,) = rows.study_records(connection)
    assert study.settings == {"excluded": [], "seed": 3}


def test_numbers_begin_at_0(connection: Connection) -> None:
    assert rows.next_number(connection, _ID) == 0


def test_only_running_studies_can_be_locked_for_a_change(connection: Connection) -> None:
    with pytest.raises(StoreError, match=_ID):
        rows.lock_own(connection, _ID, Owner.current())
    rows.insert_study(connection, _study(), (), None)
    rows.lock_own(connection, _ID, Owner.current())
    rows.update_study(connection, _ID, {"status": StudyStatus.FAILED.value})
    with pytest.raises(StoreError, match=r"ended .failed."):
        rows.lock_own(connection, _ID, Owner.current())


def test_a_study_without_owner_is_nobodys(connection: Connection) -> None:
    rows.insert_study(connection, _study(), (), None)
    assert rows.living_owner(rows.lock_study(connection, _ID)) is None
    assert not rows.beat(connection, _ID)
    assert rows.claim_study(connection, "job") is None


def test_an_owner_beats_for_its_own_study_only(connection: Connection) -> None:
    rows.insert_study(connection, _study(), (), Owner.current())
    assert rows.living_owner(rows.lock_study(connection, _ID)) is not None
    assert rows.beat(connection, _ID)
    assert not rows.beat(connection, "ffffffffffff")


def test_a_row_that_is_no_record_is_damage(connection: Connection) -> None:
    rows.insert_study(connection, _study(), (), None)
    connection.execute(update(STUDIES).values(status="asleep"))
    with pytest.raises(TraceFormatError, match=f"{_ID} is damaged"):
        rows.study_records(connection)


def test_servers_lock_rows() -> None:
    statements: list[str] = []

    class Server:
        """Notes what is executed, as PostgreSQL would read it, and has no rows."""

        def get_execution_options(self) -> dict[str, Any]:
            return {}

        def execute(self, statement: Any) -> Any:
            statements.append(str(statement.compile(dialect=postgresql.dialect())))
            return create_engine("sqlite://").connect().execute(text("SELECT 1 WHERE 0"))

    server = cast(Connection, Server())
    with pytest.raises(StoreError):
        rows.lock_study(server, _ID)
    rows.claim_study(server, "job")
    assert len(statements) == 2 and all(s.endswith("FOR UPDATE") for s in statements)
