"""The tables of a store, in types that every SQL database has; JSON is stored as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Dialect,
    Double,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)
from sqlalchemy.dialects.mysql import LONGTEXT
from sqlalchemy.types import TypeDecorator, TypeEngine

from hvd_autosync.errors import StoreError
from hvd_autosync.traces.records import StudyRecord

#: Incremented with every change of the tables.
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class DamagedJson:
    """The value of a text that is not JSON, so that whoever reads the row can name it.

    Attributes:
        problem: What is wrong with the text.
    """

    problem: str


class PlainJson(TypeDecorator[Any]):
    """Plain JSON in a text column; SQL's NULL is ``None``."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the column's type; MySQL's TEXT, of 64 KiB, is too small for many ranks."""
        small = dialect.name in ("mysql", "mariadb")
        return dialect.type_descriptor(LONGTEXT() if small else Text())

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Write ``value``.

        Raises:
            StoreError: It is not plain JSON.
        """
        try:
            return None if value is None else json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise StoreError(
                f"a value cannot be written to the trace as JSON: {error}",
                hint="Use finite numbers, text, flags, and lists and dictionaries of them.",
            ) from None

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Read what :meth:`process_bind_param` wrote; ``DamagedJson`` if it is not JSON."""
        try:
            return None if value is None else json.loads(value)
        except (ValueError, RecursionError) as error:
            return DamagedJson(str(error))


_TABLES = MetaData()

META = Table(
    "hvd_autosync_meta",
    _TABLES,
    Column("name", String(64), primary_key=True),
    Column("value", String(255), nullable=False),
)

STUDIES = Table(
    "hvd_autosync_studies",
    _TABLES,
    Column("study_id", String(12), primary_key=True),
    Column("created_at", String(32), nullable=False),
    Column("job_key", String(255), nullable=False),
    Column("command", PlainJson, nullable=False),
    Column("settings", PlainJson, nullable=False),
    Column("versions", PlainJson, nullable=False),
    Column("status", String(16), nullable=False),
    Column("task", PlainJson),
    Column("space", PlainJson),
    Column("outcome", PlainJson),
    Column("winner", PlainJson),
    # Not part of the record: keys for look-up, and the owner.
    Column("fingerprint", String(12)),
    Column("space_key", String(12)),
    Column("owner", PlainJson),
    Column("heartbeat_s", Double),
)

TRIALS = Table(
    "hvd_autosync_trials",
    _TABLES,
    Column("study_id", String(12), ForeignKey(STUDIES.c.study_id), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("kind", String(64), nullable=False),
    Column("strategy", PlainJson, nullable=False),
    Column("asked_at", String(32), nullable=False),
    Column("told_at", String(32)),
    Column("info", PlainJson, nullable=False),
    Column("result", PlainJson),
)

CLUSTERS = Table(
    "hvd_autosync_clusters",
    _TABLES,
    Column("cluster_key", String(12), primary_key=True),
    Column("measured_at", String(32), nullable=False),
    Column("links", PlainJson, nullable=False),
)

#: Stores of earlier versions lack this table; it is created when the first run is written.
RUNS = Table(
    "hvd_autosync_runs",
    _TABLES,
    Column("job_key", String(32), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("command", PlainJson, nullable=False),
    Column("ended_at", String(32), nullable=False),
    Column("strategy", PlainJson, nullable=False),
    Column("result", PlainJson, nullable=False),
)

#: Hyperparameters of related studies' models; created like RUNS.
SOURCE_FITS = Table(
    "hvd_autosync_source_fits",
    _TABLES,
    Column("study_id", String(12), primary_key=True),
    Column("key", String(64), nullable=False),
    Column("hyperparameters", PlainJson, nullable=False),
)

#: Columns of STUDIES that form a study's record.
STUDY_COLUMNS = [STUDIES.c[field.name] for field in fields(StudyRecord)]


def columns_of(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values of a row by column.

    Raises:
        ValueError: One is damaged; the message names its column.
    """
    for name, value in row.items():
        if isinstance(value, DamagedJson):
            raise ValueError(f"{name} is not JSON: {value.problem}")
    return {str(name): value for name, value in row.items()}


def create_tables(connection: Connection) -> None:
    """Create all tables and write the schema's version."""
    _TABLES.create_all(connection)
    connection.execute(META.insert().values(name="schema_version", value=str(SCHEMA_VERSION)))
