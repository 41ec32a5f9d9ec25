from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from hvd_autosync.search_space import Link, Links
from hvd_autosync.traces import TraceStore

SLOW, FAST = (Links(across=Link(2, 1e-4, rate)) for rate in (1e6, 1e8))


@pytest.fixture
def store(path: Path) -> TraceStore:
    return TraceStore(path)


def test_links_are_those_measured_last(store: TraceStore) -> None:
    assert store.find_links("cluster") is None
    for links in (SLOW, FAST):
        store.keep_links("cluster", links)
        assert store.find_links("cluster") == links
    assert store.find_links("another cluster") is None


def test_a_driver_that_measured_at_the_same_time_is_no_error(store: TraceStore, path: Path) -> None:
    """On a server it may insert between our two statements."""
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TRIGGER other BEFORE INSERT ON hvd_autosync_clusters "
            "BEGIN SELECT RAISE(ABORT, 'UNIQUE constraint failed'); END"
        )
        store.keep_links("cluster", SLOW)
        connection.execute("DROP TRIGGER other")
    connection.close()
    store.keep_links("cluster", FAST)
    assert store.find_links("cluster") == FAST
