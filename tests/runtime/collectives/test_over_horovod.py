"""What Horovod's collectives do beyond Horovod's own functions."""

from __future__ import annotations

import sys
import threading

import pytest

from hvd_autosync.runtime.collectives import over_horovod
from hvd_autosync.runtime.collectives.protocol import CollectiveError


def test_other_threads_run_before_a_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's has operations to free, and needs Python's lock for it."""
    failed, freed = threading.Event(), threading.Event()

    def free() -> None:
        failed.wait()
        freed.set()

    def fail(handle: int) -> None:
        failed.set()
        raise CollectiveError("Horovod has been shut down")

    monkeypatch.setattr(over_horovod.mpi_ops, "synchronize", fail)
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
