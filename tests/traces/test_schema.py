from __future__ import annotations

import math
import re
from typing import Any

import pytest
from sqlalchemy import create_engine, select
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.schema import CreateTable

from hvd_autosync.errors import StoreError
from hvd_autosync.traces.schema import (
    META,
    SCHEMA_VERSION,
    STUDIES,
    TRIALS,
    DamagedJson,
    PlainJson,
    create_tables,
)


def test_servers_get_types_that_hold_a_big_trial() -> None:
    trials = str(CreateTable(TRIALS).compile(dialect=mysql.dialect()))
    studies = str(CreateTable(STUDIES).compile(dialect=mysql.dialect()))
    assert "result LONGTEXT" in trials
    assert "heartbeat_s DOUBLE" in studies, "MySQL's FLOAT cannot count seconds since 1970"
    server = str(CreateTable(TRIALS).compile(dialect=postgresql.dialect()))
    assert re.search(r"result (TEXT|VARCHAR)[^(]", server), "text without a limit"


def test_create_tables_writes_the_version() -> None:
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        create_tables(connection)
        rows = connection.execute(select(META)).all()
    assert [tuple(row) for row in rows] == [("schema_version", str(SCHEMA_VERSION))]


def test_json_is_kept_as_ascii_text() -> None:
    value = {"tail": "\udcff é", "steps": [1, 2.5, None, True]}
    raw = PlainJson().process_bind_param(value, mysql.dialect())
    assert raw is not None and raw.isascii()
    assert PlainJson().process_result_value(raw, mysql.dialect()) == value
    assert PlainJson().process_bind_param(None, mysql.dialect()) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, {"a": object()}, [b"bytes"]])
def test_what_is_not_json_is_refused(value: Any) -> None:
    with pytest.raises(StoreError, match="as JSON"):
        PlainJson().process_bind_param(value, mysql.dialect())


@pytest.mark.parametrize("damaged", ["{", "[" * 100_000])
def test_damaged_text_is_read_as_such(damaged: str) -> None:
    value = PlainJson().process_result_value(damaged, mysql.dialect())
    assert isinstance(value, DamagedJson) and value.problem
