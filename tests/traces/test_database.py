from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import ArgumentError, ProgrammingError

from hvd_autosync.errors import StoreError, TraceFormatError
from hvd_autosync.traces import TraceStore
from hvd_autosync.traces import database as database_module
from hvd_autosync.traces.database import Database
from hvd_autosync.traces.schema import META

_FORK = multiprocessing.get_context("fork")


def _sql(path: Path, statement: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    with connection:
        rows = connection.execute(statement).fetchall()
    connection.close()
    return rows


def _refused(location: Path | str, error: type[StoreError], *parts: str) -> None:
    """Opening is refused with all ``parts`` in the message; a file stays as it is."""
    file = Path(location)
    before = file.read_bytes() if file.is_file() else b""
    with pytest.raises(error) as caught:
        Database(location)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert caught.value.hint
    assert (file.read_bytes() if file.is_file() else b"") == before


def test_a_new_file_is_private_and_has_a_write_ahead_log(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_autosync.traces.location.Location.allows_wal", True)
    Database(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert _sql(path, "PRAGMA journal_mode") == [("wal",)]


def test_a_network_file_system_gets_no_write_ahead_log(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_autosync.traces.location.Location.allows_wal", False)
    Database(path).close()
    assert _sql(path, "PRAGMA journal_mode") == [("delete",)]


def test_a_store_of_a_local_disk_leaves_its_log_on_a_network_file_system(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_autosync.traces.location.Location.allows_wal", True)
    Database(path).close()
    monkeypatch.setattr("hvd_autosync.traces.location.Location.allows_wal", False)
    with contextlib.closing(sqlite3.connect(f"{path}")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM sqlite_master").fetchall()
        with pytest.raises(StoreError, match="in use on the host that has its disk"):
            Database(f"sqlite:///{path}?timeout=0")
    Database(path).close()
    assert _sql(path, "PRAGMA journal_mode") == [("delete",)]


def test_a_newer_schema_is_left_alone(path: Path) -> None:
    Database(path).close()
    _sql(path, f"UPDATE {META.name} SET value = '2'")
    _refused(path, TraceFormatError, str(path), "newer", "version 2", "Upgrade")


@pytest.mark.parametrize("version", ["one", "", "0", "9" * 5000])
def test_a_schema_version_that_is_none_is_damage(path: Path, version: str) -> None:
    Database(path).close()
    _sql(path, f"UPDATE {META.name} SET value = '{version}'")
    _refused(path, TraceFormatError, str(path), "damaged")


def test_the_database_of_another_program_is_left_alone(path: Path) -> None:
    _sql(path, "CREATE TABLE bookmarks (url TEXT)")
    _refused(path, TraceFormatError, str(path), "another program")


def test_tables_of_another_shape_are_damage(path: Path) -> None:
    _sql(path, f"CREATE TABLE {META.name} (key TEXT)")
    _refused(path, TraceFormatError, str(path), "damaged")


@pytest.mark.parametrize("content", [b"x", b"a note\n" * 10, b"\0" * 5000, b"# notes\n" * 1000])
def test_a_file_that_is_no_database_is_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _refused(path, TraceFormatError, str(path), "not a trace store")


def test_a_truncated_or_overwritten_database_is_left_alone(path: Path) -> None:
    Database(path).close()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2 // 4096 * 4096])
    _refused(path, TraceFormatError, str(path), "damaged")
    path.write_bytes(whole[:100] + b"\xff" * (len(whole) - 100))
    _refused(path, TraceFormatError, str(path), "damaged")


def test_an_empty_file_is_a_new_store(path: Path) -> None:
    path.touch()
    with Database(path).writing() as connection:
        assert connection.execute(META.select()).all()


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("nosuchdatabase://me:s3cret@host/db", ("nosuchdatabase", "sqlite")),
        ("postgresql+pg8000://me:s3cret@host/db", ("pg8000", "pip install pg8000")),
        ("mysql://me:s3cret@host/db", ("pip install mysqlclient",)),
        ("mysql+mysqlconnector://me:s3cret@host/db", ("pip install mysql-connector-python",)),
        ("sqlite:////nowhere/x.db?timeout=soon&mode=s3cret", ("nowhere",)),
    ],
)
def test_urls_that_cannot_be_used(url: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        Database(url.replace("/nowhere", str(tmp_path / "nowhere")))
    assert all(part in str(caught.value) for part in parts)
    assert "s3cret" not in str(caught.value)


def test_a_locked_store_says_so(path: Path) -> None:
    database = Database(f"sqlite:///{path}?timeout=0.05")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(StoreError) as caught, database.writing():
            pass
        assert str(path) in caught.value.message and "locked" in caught.value.message
        with database.reading() as connection:
            assert connection.execute(META.select()).all(), "readers need not wait"
    finally:
        holder.close()


def test_a_failed_transaction_leaves_nothing(path: Path) -> None:
    database = Database(path)
    with pytest.raises(ZeroDivisionError), database.writing() as connection:
        connection.execute(META.insert().values(name="half", value="done"))
        raise ZeroDivisionError
    with database.reading() as connection:
        assert "half" not in [row.name for row in connection.execute(META.select())]


def test_a_database_in_memory_is_one_for_all_threads() -> None:
    database = Database("sqlite://")

    def write(number: int) -> None:
        with database.writing() as connection:
            connection.execute(META.insert().values(name=str(number), value=""))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.reading() as connection:
        assert len(connection.execute(META.select()).all()) == 9


def _as_nobody(action: Callable[[], None]) -> str:
    """The error of ``action`` for a user who may write nowhere."""

    def run(answers: multiprocessing.Queue[str]) -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        try:
            action()
        except StoreError as error:
            answers.put(f"{type(error).__name__}: {error}")
        else:
            answers.put("")

    answers: multiprocessing.Queue[str] = _FORK.Queue()
    child = _FORK.Process(target=run, args=(answers,))
    child.start()
    answer = answers.get(timeout=120)
    child.join()
    return answer


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that others may read. Those of pytest are closed whenever another run of it begins."""
    with tempfile.TemporaryDirectory(prefix="autosync-test-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_an_unwritable_store_can_be_read_and_says_why_it_cannot_be_written(
    open_folder: Path,
) -> None:
    path = open_folder / "traces.db"
    with sqlite3.connect(path) as connection:  # no log: reading it would need to write
        connection.execute("PRAGMA journal_mode=DELETE")
    Database(f"sqlite:///{path}").close()
    _sql(path, "PRAGMA journal_mode=DELETE")
    path.chmod(0o444)
    open_folder.chmod(0o555)

    def read() -> None:
        with Database(path).reading() as connection:
            assert connection.execute(META.select()).all()

    def write() -> None:
        with Database(path).writing() as connection:
            connection.execute(META.insert().values(name="a", value="b"))

    try:
        assert _as_nobody(read) == ""
        message = _as_nobody(write)
        assert str(path) in message and "writable" in message
        message = _as_nobody(lambda: Database(open_folder / "new.db").close())
        assert "new.db" in message and "may write to" in message
        path.chmod(0o000)
        message = _as_nobody(read)
        assert str(path) in message and "writable" in message
    finally:
        open_folder.chmod(0o755)


def _create(path: Path, start: multiprocessing.synchronize.Barrier) -> None:
    start.wait()
    Database(path).close()


def test_processes_that_create_one_store_at_once_share_it(tmp_path: Path) -> None:
    for attempt in range(5):
        path = tmp_path / f"{attempt}.db"
        start = _FORK.Barrier(3)
        children = [_FORK.Process(target=_create, args=(path, start)) for _ in range(3)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0, 0, 0]
        assert _sql(path, f"SELECT count(*) FROM {META.name}") == [(1,)]


@pytest.mark.parametrize(("raised", "logged"), [(KeyboardInterrupt, False), (OSError, True)])
def test_ctrl_c_while_a_connection_is_closed_leaves_no_traceback(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    raised: type[BaseException],
    logged: bool,
) -> None:
    database = Database(path)

    def close(connection: sqlite3.Connection) -> None:
        connection.close()
        raise raised

    monkeypatch.setattr(database._engine.dialect, "do_close", close)
    with contextlib.suppress(KeyboardInterrupt), database.reading():
        pass
    assert ("Exception closing connection" in caplog.text) == logged


@pytest.mark.parametrize("parameter", ["password", "sslpassword", "options", "unknown"])
def test_no_message_has_a_secret_parameter(parameter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ArgumentError(f"invalid {parameter} 's3cr/et' in s3cr%2Fet")

    monkeypatch.setattr(database_module, "create_engine", refuse)
    with pytest.raises(StoreError, match="host/db") as caught:
        Database(f"postgresql://host/db?{parameter}=s3cr%2Fet")
    assert "s3cr" not in str(caught.value) and "invalid" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "variable", "expected"),
    [
        ("postgresql://host/db", "", {"connect_timeout": 5}),
        ("postgresql+psycopg://host/db?sslmode=require", "", {"connect_timeout": 5}),
        ("postgresql+psycopg://host/db?connect_timeout=60", "", {}),
        ("postgresql+psycopg://host/db", "60", {}),
        ("postgresql+pg8000://host/db", "", {}),
    ],
)
def test_an_attempt_to_connect_to_a_server_takes_5_s(
    url: str, variable: str, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond that a heartbeat would hold up a trial whose host does not reach the server."""
    given: list[object] = []

    def make(*_: object, connect_args: object = None, **__: object) -> None:
        given.append(connect_args)
        raise ArgumentError("seen")

    if variable:
        monkeypatch.setenv("PGCONNECT_TIMEOUT", variable)
    else:
        monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)
    monkeypatch.setattr(database_module, "create_engine", make)
    with pytest.raises(StoreError, match="seen"):
        Database(url)
    assert given == [expected]


@pytest.mark.parametrize("attribute", ["sqlstate", "pgcode"])
def test_a_missing_right_is_no_damage(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Denied(Exception):
        """What a driver of PostgreSQL raises; it is a ``ProgrammingError`` of the DBAPI."""

    setattr(Denied, attribute, "42501")

    def refuse(_: object) -> None:
        raise ProgrammingError("SELECT", {}, Denied("keine Berechtigung für Tabelle"))

    monkeypatch.setattr(Engine, "connect", refuse)
    with pytest.raises(StoreError, match="keine Berechtigung für Tabelle") as caught:
        Database("sqlite://")
    assert not isinstance(caught.value, TraceFormatError)
    assert "Grant this user the rights to create" in caught.value.hint


def test_a_store_is_created_only_where_it_may_be(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "traces.db"
    with pytest.raises(StoreError, match=r"there is no trace store .*/folder/traces\.db"):
        Database(path, create=False)
    assert not path.parent.exists()
    path = tmp_path / "empty.db"
    path.touch()
    for location in (path, "sqlite://"):
        with pytest.raises(StoreError, match="there is no trace store"):
            Database(location, create=False)
    assert path.stat().st_size == 0
    Database(path).close()
    with Database(path, create=False).reading() as connection:
        assert connection.execute(META.select()).all()


def test_the_default_store_is_empty_before_it_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    file = tmp_path / "hvd-autosync" / "traces.db"
    store = TraceStore(create=False)
    assert store.ids() == [] and store.name == str(file)
    with pytest.raises(StoreError, match=f"{re.escape(store.name)} has no study yet"):
        store.study("last")
    assert not file.parent.exists()
    # One that was named is expected to be there.
    monkeypatch.setenv("HVD_AUTOSYNC_STORE", str(file))
    with pytest.raises(StoreError, match="there is no trace store"):
        TraceStore(create=False)


def test_a_store_that_was_named_may_be_empty_before_it_is_created(tmp_path: Path) -> None:
    missing, empty = tmp_path / "folder" / "traces.db", tmp_path / "empty.db"
    empty.touch()
    for location in (str(missing), str(empty), "sqlite://"):
        store = TraceStore(location, create=False, or_empty=True)
        assert store.ids() == [] and store.name == location
        with pytest.raises(StoreError, match=f"{re.escape(location)} has no study yet"):
            store.study("last")
    assert list(tmp_path.iterdir()) == [empty] and empty.stat().st_size == 0
    with TraceStore(missing)._database.writing() as connection:
        connection.execute(META.insert().values(name="kept", value="1"))
    database = Database(missing, create=False, or_empty=True)
    with database.reading() as connection:
        assert connection.execute(META.select().where(META.c.name == "kept")).all()
