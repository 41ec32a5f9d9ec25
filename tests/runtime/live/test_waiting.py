"""What another thread sees of a rank that waits: in an exchange, or on the script's behalf."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.runtime.collectives import over_horovod
from hvd_autosync.runtime.exchange.dispatcher import Dispatcher
from hvd_autosync.runtime.exchange.exchanges import Steps
from hvd_autosync.runtime.live import helper
from hvd_autosync.runtime.live.helper import ALIVE, Helper
from hvd_autosync.runtime.live.waiting import waits_in_exchange


def calling(module: str, name: str) -> Callable[..., Any]:
    """A function of this name in a module, which calls its first argument with the others."""
    space: dict[str, Any] = {"__name__": module}
    exec(f"def {name}(called, *others): return called(*others)", space)
    function: Callable[..., Any] = space[name]
    return function


SYNCHRONIZE = calling("horovod.torch.mpi_ops", "synchronize")
JOIN = calling("horovod.torch.mpi_ops", "join")
ALLREDUCE = calling("horovod.torch.mpi_ops", "allreduce")
OURS = calling("hvd_autosync.runtime.exchange.dispatcher", "finish")
PAUSES = calling("hvd_autosync.runtime.collectives.over_horovod", "_wait")
ANY = calling("hvd_autosync.runtime.exchange.dispatcher", "_await_any")
POLL = calling("horovod.torch.mpi_ops", "poll")
SCRIPT = calling("__main__", "evaluate")


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ((SCRIPT, OURS, SYNCHRONIZE), True),
        ((SCRIPT, OURS, ALLREDUCE, SYNCHRONIZE), True),
        ((SCRIPT, OURS, PAUSES), True),
        ((SCRIPT, OURS, PAUSES, POLL), True),
        ((SCRIPT, OURS, ANY), True),
        ((SCRIPT, OURS, ANY, POLL), True),
        ((SCRIPT, SYNCHRONIZE), False),
        ((SCRIPT, ALLREDUCE, SYNCHRONIZE), False),
        ((SCRIPT, OURS, JOIN, SYNCHRONIZE), False),
        ((SCRIPT, OURS, SCRIPT), False),
    ],
    ids=[
        "exchange",
        "agreement",
        "pauses",
        "look",
        "any",
        "look for any",
        "wait",
        "metric",
        "join",
        "evaluation",
    ],
)
def test_waits_in_exchange(calls: tuple[Callable[..., Any], ...], expected: bool) -> None:
    # A lock's method waits without a frame of Python, as Horovod's library does.
    lock = threading.Lock()
    lock.acquire()
    thread = in_thread(*calls, lock.acquire, until=calls[-1])
    assert waits_in_exchange() == expected
    lock.release()
    thread.join()


def in_thread(function: Callable[..., Any], *args: Any, until: Any) -> threading.Thread:
    """A thread that calls a function, and runs the code of another one now."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    assert thread.ident is not None
    code, deadline = until.__code__, time.monotonic() + 60
    while (frame := sys._current_frames().get(thread.ident)) is None or frame.f_code is not code:
        assert time.monotonic() < deadline, f"the thread, alive: {thread.is_alive()}, is in {frame}"
        time.sleep(0.001)
    return thread


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Handles of operations that are done; others are under way."""
    handles: set[int] = set()
    for name, value in (
        ("_handle_map", {7: None, 8: None}),
        ("poll", handles.__contains__),
        ("local_size", lambda: 2),
        ("synchronize", lambda handle: None),
    ):
        monkeypatch.setattr(over_horovod.mpi_ops, name, value)
    monkeypatch.setattr(over_horovod.OverHorovod, "poll", staticmethod(handles.__contains__))
    monkeypatch.setattr(over_horovod, "_one_processor_each", lambda ranks: True)
    return handles


def test_a_wait_in_pauses_is_one(done: set[int]) -> None:
    """It never reaches Horovod's own wait while the others do not come."""
    thread = in_thread(over_horovod.HOROVOD.synchronize, 7, until=over_horovod._wait)
    assert waits_in_exchange()
    done.add(7)
    thread.join()


def test_a_wait_for_one_of_several_exchanges_is_one(done: set[int]) -> None:
    own = Dispatcher("name", lambda arrived: [], [], lambda: None)
    staged = [exchange_of(7), exchange_of(8)]
    thread = in_thread(own.run, staged, until=Dispatcher._await_any)
    assert waits_in_exchange()
    done |= {7, 8}
    thread.join()


def exchange_of(handle: int) -> Steps:
    """An exchange of one operation."""
    yield handle


class Process:
    """A helper process whose pipes are in memory."""

    def __init__(self) -> None:
        self.stdin, self.stdout = Kept(), io.BytesIO()

    def wait(self) -> int:
        return 0


class Kept(io.BytesIO):
    """Keeps what was written when it is closed."""

    def close(self) -> None:
        self.written = self.getvalue()
        super().close()


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_does_not_wait_is_alive(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "_ALIVE_EVERY_S", 0.02)
    looked = threading.Semaphore(0)

    def look() -> bool:
        looked.release()
        return waits

    process = Process()
    own = Helper(process, look)  # type: ignore[arg-type]
    for _ in range(3):
        assert looked.acquire(timeout=120)
    own.close()
    assert process.stdin.written.count(b"alive") >= 2 * (not waits)
    assert (ALIVE["type"].encode() in process.stdin.written) is not waits
