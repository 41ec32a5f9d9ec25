"""The database of a store: connections, transactions, the check of the schema, error messages.

Each transaction opens a connection of its own, because drivers fork trial processes and an SQLite
connection must not be used across a fork. Opening one takes well under a millisecond.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, select
from sqlalchemy.exc import (
    DBAPIError,
    NoSuchModuleError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
)
from sqlalchemy.pool import NullPool, QueuePool

from hvd_autosync.errors import AutosyncError, StoreError, TraceFormatError
from hvd_autosync.traces.location import Location, is_there, prepare_file, resolve_location
from hvd_autosync.traces.outage import (
    LostTransactionError,
    connect_again,
    transaction_number,
    was_committed,
)
from hvd_autosync.traces.schema import META, SCHEMA_VERSION, create_tables

_BUSY_TIMEOUT_S = 30
#: Longest attempt to connect to a server, unless the URL or libpq's variable names another; the
#: heartbeat of a trial makes one while the trial runs. Without it a host that drops packets takes
#: what the system's TCP allows, two minutes and more.
_CONNECT_TIMEOUT_S = 5
#: Drivers over libpq, which has ``connect_timeout``.
_LIBPQ = ("psycopg", "psycopg2", "psycopg2cffi")
_USE_ANOTHER = "Use another store, or restore this one from a copy."
#: Part of a database driver's message -> remedy. The first match counts.
_REMEDIES = {
    "locked": "Another process has locked the store: wait until it ends, or use another store.",
    "readonly": "Make the file and its folder writable, or use another store.",
    "unable to open": "Make the file and its folder writable, or use another store.",
    "full": "Free some space, or use another store.",
    # SQLite also reports this if there is no space for the index of its journal.
    "disk I/O": "Free some space on its disk, or use another store.",
}
#: Module of a database driver -> package that has it, if that has another name.
_PACKAGES = {"MySQLdb": "mysqlclient", "mysql": "mysql-connector-python"}
#: Parts of SQLite's messages about files that are damaged or not trace stores.
_DAMAGE = ("malformed", "not a database", "no such table", "no such column", "has no column")
#: What PostgreSQL calls a missing right; its messages may be in any language.
_NO_RIGHT = "42501"


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    """Return whether a log record is not about an interrupt, such as Ctrl-C or SIGTERM.

    SQLAlchemy logs exceptions that occur while it closes a connection, with a traceback.
    """
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or issubclass(kind, Exception)


# An interrupt at that moment is still raised, so it need not be logged.
for _pool in (NullPool, QueuePool):
    logging.getLogger(f"{_pool.__module__}.{_pool.__name__}").addFilter(_is_no_interrupt)


class Database:
    """Transactions on one store. Threads may share it; a forked child may use it too.

    Args:
        location: As for :func:`~hvd_autosync.traces.location.resolve_location`.
        create: Whether to create a store that does not exist. Otherwise one that was named is an
            error, and the default store is empty.
        or_empty: Whether, where it is not created, one that was named is empty, too.

    Raises:
        StoreError: The database cannot be opened, or there is none and that is an error.
        TraceFormatError: The database is not a trace store, is damaged, or is of a newer version;
            it was not changed.
    """

    def __init__(
        self,
        location: str | os.PathLike[str] | None,
        *,
        create: bool = True,
        or_empty: bool = False,
    ) -> None:
        self._location = resolve_location(location)
        self._name = self._location.name
        #: Whether to wait for a lost server; not before the first connection succeeded.
        self._waits = False
        file = self._location.file
        there = create or file is None or is_there(file)
        if there and file is not None:
            prepare_file(file)
        self._set_engine()
        if not there or not self._has_tables():
            if not create:
                if not (or_empty or self._location.is_default):
                    raise self._no_store()
                # Before the first job it is empty, in memory.
                self._engine.dispose()
                self._location = replace(self._location, url=URL.create("sqlite"))
                self._set_engine()
            self._create_tables()
        elif file is not None and _has_log(file) and not self._location.allows_wal:
            self._leave_log()
        self._waits = not self._location.is_sqlite

    def _set_engine(self) -> None:
        self._engine = _create_engine(self._location)
        self._engine.update_execution_options(store=self._name)  # for messages

    @property
    def name(self) -> str:
        """Name of the store for messages, without secrets."""
        return self._name

    @property
    def files(self) -> tuple[str, ...]:
        """Files that are written, including SQLite's temporary ones."""
        file = self._location.file
        ends = () if file is None else ("", "-journal", "-wal", "-shm")
        return tuple(f"{file}{end}" for end in ends)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """One consistent view of the database."""
        with self._translated_errors(), self._connect(self._engine) as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self, *, wait: bool = True) -> Iterator[Connection]:
        """One transaction, committed at the end; in SQLite it excludes other writers at once.

        Args:
            wait: Whether to wait for a lost server, and for other writers in SQLite.

        Raises:
            LostTransactionError: The connection was lost, or the database is locked and was not
                waited for; nothing was written.
        """
        engine = self._engine.execution_options(begin="BEGIN IMMEDIATE", wait=wait)
        with (
            self._translated_errors(wait=wait),
            self._connect(engine, wait=wait) as connection,
            connection.begin() as transaction,
        ):
            number = transaction_number(connection)
            yield connection
            try:
                transaction.commit()
            except DBAPIError as error:
                if not (self._waits and error.connection_invalidated):
                    raise
                written = number and was_committed(self._engine, number, self._location)
                if written is False:
                    raise
                if not written:
                    raise _translate(error, error.orig, self._location) from error

    def stop_waiting(self) -> None:
        """Let a lost server be an error at once from now on."""
        self._waits = False

    def close(self) -> None:
        """Close the database."""
        self._engine.dispose()

    def _no_store(self) -> StoreError:
        return StoreError(
            f"there is no trace store {self.name}",
            hint="Check its name. A job with --autosync or hvd-autosync traces import creates it.",
        )

    def _connect(self, engine: Engine, *, wait: bool = True) -> Connection:
        if self._waits and wait:
            return connect_again(engine, self._location)
        try:
            return engine.connect()
        except OperationalError as error:
            if self._waits:
                raise self._lost(error) from None
            raise

    def _lost(self, error: DBAPIError) -> LostTransactionError:
        translated = _translate(error, error.orig, self._location)
        return LostTransactionError(translated.message, hint=translated.hint)

    @contextlib.contextmanager
    def _translated_errors(self, *, wait: bool = True) -> Iterator[None]:
        """Translate errors of SQLAlchemy to ours."""
        try:
            yield
        except SQLAlchemyError as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            original = getattr(error, "orig", None)
            if isinstance(original, AutosyncError):
                raise original from None
            if isinstance(error, DBAPIError):
                busy = not wait and self._location.is_sqlite and "locked" in str(cause)
                if busy or (self._waits and error.connection_invalidated):
                    raise self._lost(error) from error
            raise _translate(error, cause, self._location) from error

    def _has_tables(self) -> bool:
        """Return whether the tables exist, in a version that we can read."""
        with self.reading() as connection:
            return self._check(connection)

    def _check(self, connection: Connection) -> bool:
        tables = inspect(connection).get_table_names()
        if META.name not in tables:
            if tables and self._location.is_sqlite:
                raise TraceFormatError(
                    f"{self.name} is not a trace store: it belongs to another program",
                    hint="Name another file, or none to use the default store.",
                )
            return False
        query = select(META.c.value).where(META.c.name == "schema_version")
        version = str(connection.execute(query).scalar())
        if not re.fullmatch("[1-9][0-9]{0,8}", version):
            raise TraceFormatError(f"{self.name} is damaged: no schema version", hint=_USE_ANOTHER)
        if int(version) > SCHEMA_VERSION:
            raise TraceFormatError(
                f"{self.name} was written by a newer hvd-autosync (schema version {version}; "
                f"this one supports {SCHEMA_VERSION})",
                hint="Upgrade hvd-autosync, or use another store.",
            )
        return True

    def _create_tables(self) -> None:
        if self._location.allows_wal:
            # This fails while another process is creating the same store; that one then sets it.
            with contextlib.suppress(DBAPIError), self._engine.connect() as connection:
                connection.execution_options(begin=None)
                connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        try:
            with self.writing() as connection:
                if not self._check(connection):
                    create_tables(connection)
        except StoreError:
            # Another process may have created them at the same moment, if no lock prevents that.
            if not self._has_tables():
                raise

    def _leave_log(self) -> None:
        """Write no log ahead any more: the store is on a network file system now."""
        try:
            with self._engine.connect() as connection:
                connection.execution_options(begin=None)
                connection.exec_driver_sql("PRAGMA journal_mode=DELETE")
        except DBAPIError as error:
            raise StoreError(
                f"{self.name} is in use on the host that has its disk, in a way that would damage "
                f"it from here: {error.orig}",
                hint="Try again when nothing uses it there; from then on both can.",
            ) from None


def _has_log(file: Path) -> bool:
    """Return whether an SQLite file says that it is written with a write-ahead log."""
    with contextlib.suppress(OSError), open(file, "rb") as opened:
        return opened.read(19)[18:] == b"\2"  # sqlite.org/fileformat.html, section 1.3
    return False


def _create_engine(location: Location) -> Engine:
    """Return the engine for ``location``; it does not open the database yet."""
    try:
        if not location.is_sqlite:
            return _create_server_engine(location.url)
        return _create_sqlite_engine(location.url)
    except NoSuchModuleError:
        raise StoreError(
            f"{location.name}: unknown database {location.url.drivername!r}",
            hint="Use sqlite, postgresql, mysql or another database that SQLAlchemy supports.",
        ) from None
    except ImportError as error:
        package = _PACKAGES.get(error.name or "", error.name)
        raise StoreError(
            f"{location.name}: this database needs the Python package {package}",
            hint=f"Install it (pip install {package}), or name another driver in the URL.",
        ) from None
    except (SQLAlchemyError, TypeError, ValueError) as error:
        raise _translate(error, error, location) from None


def _create_server_engine(url: URL) -> Engine:
    arguments: dict[str, int] = {}
    chosen = "connect_timeout" in url.query or "PGCONNECT_TIMEOUT" in os.environ
    if url.get_driver_name() in _LIBPQ and not chosen:
        arguments["connect_timeout"] = _CONNECT_TIMEOUT_S
    return create_engine(url, connect_args=arguments, poolclass=NullPool)


def _create_sqlite_engine(url: URL) -> Engine:
    if "timeout" not in url.query:
        url = url.update_query_dict({"timeout": str(_BUSY_TIMEOUT_S)})
    # Without an isolation level the driver leaves BEGIN to us. Its own BEGIN comes too late: two
    # writers could read the same number.
    arguments = {"isolation_level": None, "check_same_thread": False}
    if url.database in (None, "", ":memory:"):
        # A database in memory lives in one connection, which is used by one thread at a time.
        engine = create_engine(
            url, connect_args=arguments, poolclass=QueuePool, pool_size=1, max_overflow=0
        )
    else:
        engine = create_engine(url, connect_args=arguments, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if not options.get("wait", True):
            connection.exec_driver_sql("PRAGMA busy_timeout = 0")
        statement = options.get("begin", "BEGIN")
        if statement is not None:
            connection.exec_driver_sql(statement)

    return engine


def _translate(error: Exception, cause: BaseException | None, location: Location) -> StoreError:
    """Translate the error of a database driver."""
    text = location.without_secrets(" ".join(str(cause).split()))
    # psycopg has ``sqlstate``, psycopg2 has ``pgcode``.
    if _NO_RIGHT in (getattr(cause, "sqlstate", None), getattr(cause, "pgcode", None)):
        return StoreError(
            f"{location.name}: {text}",
            hint="Grant this user the rights to create, read and change the tables of the store, "
            "or use another store.",
        )
    if isinstance(error, ProgrammingError) or any(part in text for part in _DAMAGE):
        return TraceFormatError(
            f"{location.name} is damaged, or not a trace store: {text}", hint=_USE_ANOTHER
        )
    for part, remedy in _REMEDIES.items():
        if part in text:
            return StoreError(f"{location.name}: {text}", hint=remedy)
    return StoreError(
        f"{location.name}: {text}",
        hint="Check that the database can be reached with this URL, or use another store.",
    )
