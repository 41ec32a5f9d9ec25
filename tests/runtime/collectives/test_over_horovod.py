"""What Horovod's collectives do beyond Horovod's own functions."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from hvd_autosync.runtime.collectives import over_horovod
from hvd_autosync.runtime.collectives.protocol import CollectiveError


def test_other_threads_run_before_a_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's has operations to free, and needs Python's lock for it.

    The pause lasts until they are free, however late the other thread gets a processor.
    """
    failed, freed = threading.Event(), threading.Event()

    def free() -> None:
        failed.wait()
        freed.set()

    def fail(handle: int) -> None:
        failed.set()
        raise CollectiveError("Horovod has been shut down")

    monkeypatch.setattr(over_horovod.mpi_ops, "synchronize", fail)
    pause = SimpleNamespace(sleep=lambda pause_s: freed.wait(120))
    monkeypatch.setattr(over_horovod, "time", pause)
    thread = threading.Thread(target=free)
    thread.start()
    usual = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # no thread is interrupted
    try:
        with pytest.raises(CollectiveError):
            over_horovod.HOROVOD.synchronize(1)
        assert freed.is_set()
    finally:
        sys.setswitchinterval(usual)
        thread.join()


@pytest.mark.parametrize(
    ("processors", "looks"),
    [(2, 4), (3, 4), (4, 1)],
    ids=["one each", "less than two each", "two each"],
)
def test_a_rank_with_one_processor_leaves_it_to_horovod_while_it_waits(
    processors: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod's own wait would take it from the thread that it waits for."""
    seen = []

    def poll(handle: int) -> bool:
        seen.append(handle)
        return len(seen) == 4

    monkeypatch.setattr(over_horovod.os, "sched_getaffinity", lambda process: range(processors))
    over_horovod._one_processor_each.cache_clear()
    for name, value in (
        ("_handle_map", {7: None}),
        ("poll", poll),
        ("local_size", lambda: 2),
        ("synchronize", lambda handle: f"result of {handle}"),
    ):
        monkeypatch.setattr(over_horovod.mpi_ops, name, value)
    try:
        assert over_horovod.HOROVOD.synchronize(7) == "result of 7"
    finally:
        over_horovod._one_processor_each.cache_clear()
    assert seen == [7] * looks
