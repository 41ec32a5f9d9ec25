"""What can be tested of test beds without making one, and so without root."""

from __future__ import annotations

import sys
from typing import Any

import psutil
import pytest

from hvd_autosync.testing import daemon


def test_ctrl_c_ends_the_daemon_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []

    def find() -> None:
        if looks:
            raise KeyboardInterrupt
        looks.append(True)

    def run_main(*_: Any) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(100)"]

    monkeypatch.setattr(daemon, "find", find)
    monkeypatch.setattr(daemon, "run_main", run_main)
    before = set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt):
        daemon.up(2, 1, [None, None])
    assert set(psutil.Process().children()) <= before
