"""What can be tested of test beds without making one, and so without root."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hvd_autosync.testing import TestbedError, daemon
from hvd_autosync.testing.namespaces import enter_command, run_tool


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


def test_signals_are_not_blocked_on_the_hosts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Processes inherit the mask of the daemon that makes the hosts."""
    masks: list[set[Any]] = []

    def mask() -> set[Any]:
        return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    @contextmanager
    def testbed(*_: Any) -> Iterator[Any]:
        masks.append(mask())
        yield SimpleNamespace(hosts=(), pids=(), horovodrun_options=lambda slots: [])

    monkeypatch.setattr(daemon, "Testbed", testbed)
    monkeypatch.setattr(daemon, "_STATE", tmp_path / "state.json")
    monkeypatch.setattr(signal, "sigwait", lambda signals: masks.append(mask() & set(signals)))
    monkeypatch.setattr(sys, "argv", ["", '{"hosts": 2, "slots": 1, "rates_mbit": [null, null]}'])
    before = mask()
    try:
        daemon.main()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert masks == [before, {signal.SIGTERM, signal.SIGINT}]


def test_a_host_whose_first_process_has_ended_is_an_error() -> None:
    with subprocess.Popen(["sleep", "100"]) as holder:
        try:
            with pytest.raises(TestbedError, match=f"its holder {holder.pid} has no child"):
                enter_command(holder.pid, ["hostname"])
        finally:
            holder.kill()
    with pytest.raises(TestbedError, match="has no child"):
        enter_command(holder.pid, ["hostname"])


def test_a_tool_that_fails_outside_of_hosts_is_an_error() -> None:
    with pytest.raises(TestbedError, match="sh failed: refused"):
        run_tool(None, "sh", "-c", "echo refused >&2; exit 2")
