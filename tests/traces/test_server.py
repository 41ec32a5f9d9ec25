"""A store on a real PostgreSQL server: several writers, and a server that goes away."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from hvd_autosync.errors import StoreError
from hvd_autosync.search_space import Strategy, TrialResult
from hvd_autosync.traces import StudyStatus, TraceStore, outage
from hvd_autosync.traces.runs import RunRecord
from hvd_autosync.traces.schema import RUNS

pytestmark = pytest.mark.slow
psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed: make dev installs it")

_PROGRAMS = [*Path("/usr/lib/postgresql").glob("*/bin"), *Path("/usr/pgsql").glob("*/bin")]


class Server:
    """A PostgreSQL of our own, behind a socket in a folder; as root it runs as ``nobody``."""

    def __init__(self, folder: Path, programs: str) -> None:
        self._folder, self._programs = folder, programs
        self._as = ["runuser", "-u", "nobody", "--"] if os.geteuid() == 0 else []
        if self._as:
            shutil.chown(folder, "nobody")
        options = ["-U", "tuner", "-A", "trust", "--no-sync"]
        self._call("initdb", "-D", f"{folder}/data", *options)
        self.start()

    def start(self) -> None:
        settings = f"-c fsync=off -c listen_addresses='' -k {self._folder}"
        log = f"{self._folder}/log"
        self._call("pg_ctl", "start", "-w", "-D", f"{self._folder}/data", "-o", settings, "-l", log)

    def stop(self, how: str) -> None:
        self._call("pg_ctl", "stop", "-w", "-D", f"{self._folder}/data", "-m", how)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://tuner@/{database}?host={self._folder}"

    def _call(self, program: str, *words: str) -> None:
        subprocess.run(
            [*self._as, os.path.join(self._programs, program), *words],
            check=True,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=100,
            cwd=self._folder,
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = shutil.which("initdb", path=os.pathsep.join(map(str, [*_PROGRAMS, os.defpath])))
    if found is None:
        pytest.skip("PostgreSQL is not installed: make test-deps installs it")
    with tempfile.TemporaryDirectory(prefix="hvd-pg-") as folder:  # a socket's path is short
        made = Server(Path(folder), os.path.dirname(found))
        yield made
        made.stop("immediate")


@pytest.fixture
def url(server: Server, request: pytest.FixtureRequest) -> str:
    """A new database."""
    name = f"db{time.monotonic_ns()}"
    engine = create_engine(server.url("postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return server.url(name)


def at_once(count: int, action: Callable[[int], Any]) -> list[Any]:
    """What ``count`` threads that begin together come to."""
    barrier = threading.Barrier(count)

    def run(number: int) -> Any:
        barrier.wait()
        return action(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def created(store: TraceStore) -> str:
    return store.create_study(job_key="job", command=["x"], settings={}, versions={}).study_id


def a_run(number: int) -> RunRecord:
    return RunRecord(
        "job",
        0,
        ("x",),
        "2026-01-01T00:00:00.000000+00:00",
        Strategy(),
        0.5,
        float(number),
        "script",
        1.0,
        10,
        "completed",
    )


def test_several_create_one_schema_at_once(url: str) -> None:
    stores = at_once(6, lambda _: TraceStore(url))
    ids = at_once(6, lambda number: created(stores[number]))
    assert {study.study_id for study in stores[0].studies()} == set(ids)


def test_numbers_have_no_gaps_with_several_writers(url: str) -> None:
    with closing(TraceStore(url)) as store:
        with store._database.writing() as connection:
            RUNS.drop(connection)  # as in a store of an earlier version
        assert sorted(at_once(6, lambda number: store.keep_run(a_run(number)))) == [*range(6)]
        assert {run.metric for run in store.runs("job")} == {*map(float, range(6))}
        study_id = created(store)
        asked = at_once(6, lambda _: store.ask(study_id, Strategy(), "model", {}))
        assert sorted(asked) == [*range(6)]


@pytest.mark.parametrize("how", ["fast", "immediate"])
def test_a_server_that_stops_is_waited_for(
    url: str,
    server: Server,
    how: str,
    make_result: Callable[..., TrialResult],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with closing(TraceStore(url)) as store:
        study_id = created(store)
        number = store.ask(study_id, Strategy(), "default", {})
        server.stop(how)
        pauses: list[float] = []

        def sleep(pause_s: float) -> None:
            pauses.append(pause_s)
            if len(pauses) == 1:
                server.start()

        monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        try:
            store.heartbeat(study_id)  # a trial may be running: not waited for
            assert not pauses
            store.tell(study_id, number, make_result(0.2))
        finally:
            if not pauses:
                server.start()
        assert pauses
        said = capfd.readouterr().err
        assert said.count("does not answer; waiting for it, for at most 10 minutes") == 1
        assert url.partition("://")[0] in said
        store.heartbeat(study_id)
        assert [t.result is not None for t in store.trials(study_id)] == [True]


def test_the_wait_is_bounded(
    url: str, server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outage, "WAIT_S", 0.5)
    with closing(TraceStore(url)) as store:
        server.stop("fast")
        try:
            with pytest.raises(StoreError, match="postgresql") as caught:
                store.studies()
            assert "can be reached" in caught.value.hint
            with pytest.raises(StoreError):
                TraceStore(url)  # which was never there for this one
        finally:
            server.start()
        assert capfd.readouterr().err.count("does not answer") == 1
        assert store.studies() == []


@pytest.mark.parametrize("committed", [False, True])
def test_a_transaction_whose_commit_is_lost_is_written_once(
    url: str, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    with closing(TraceStore(url)) as store:
        study_id = created(store)
        dialect = store._database._engine.dialect
        lost: list[bool] = []
        commit = dialect.do_commit

        def lose(connection: Any) -> None:
            if lost:
                commit(connection)
                return
            lost.append(True)
            if committed:
                commit(connection)
            connection.dbapi_connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(dialect, "do_commit", lose)
        assert store.ask(study_id, Strategy(), "default", {}) == 0
        assert [trial.number for trial in store.trials(study_id)] == [0]
        assert lost


def test_a_connection_that_ends_within_a_transaction_loses_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hvd_autosync.traces import rows

    with closing(TraceStore(url)) as store:
        study_id = created(store)
        insert, ended = rows.insert_trial, []

        def end(connection: Any, trial: Any) -> None:
            insert(connection, trial)
            if not ended:
                ended.append(True)
                connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

        monkeypatch.setattr(rows, "insert_trial", end)
        assert store.ask(study_id, Strategy(), "default", {}) == 0
        store.finish(study_id, StudyStatus.FAILED, {}, None)
        assert [trial.number for trial in store.trials(study_id)] == [0]
        assert ended
