"""What a time limit leaves behind: nothing, also where its thread cannot start."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.runtime.collectives import reinitialize
from hvd_autosync.runtime.collectives.time_limit import time_limit


@pytest.fixture(autouse=True)
def _no_handler() -> Iterator[None]:
    """As in a script that does not handle SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def state() -> tuple[object, int, int]:
    """The handler of SIGTERM, who reads numbers of signals, and how many files are open."""
    reader = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(reader)
    return signal.getsignal(signal.SIGTERM), reader, len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_after_it() -> None:
    before = state()
    with time_limit(60.0, print):
        assert state() != before
    assert state() == before


def test_nothing_is_left_where_its_thread_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = state()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"), time_limit(60.0, print):
        pytest.fail("it has begun")
    assert state() == before


def test_without_it_horovod_is_not_started_again_and_keeps_its_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later start would read them, whatever it is for."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    known = reinitialize._Report("", "", [], {}, 1.0)
    for name, value in {
        "settle": None,
        "steps_without_barrier": False,
        "in_flight": "",
        "registered_process_sets": {},
        "last_initialization": None,
        "_own_refusal": "",
        "_meets_at_a_server": False,
        "_gather": [known, known],
    }.items():
        monkeypatch.setattr(reinitialize, name, lambda *_, value=value: value)
    monkeypatch.setattr(reinitialize.mpi_ops, "rank", lambda: 0)
    monkeypatch.setattr(reinitialize.mpi_ops, "size", lambda: 2)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "3")
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "7")
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        reinitialize.reinitialize({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_CACHE_CAPACITY": None})
    assert os.environ["HOROVOD_CYCLE_TIME"] == "3"
    assert os.environ["HOROVOD_CACHE_CAPACITY"] == "7"
