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
