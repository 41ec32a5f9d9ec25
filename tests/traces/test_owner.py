from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvd_autosync.traces import owner as owners
from hvd_autosync.traces.owner import HEARTBEAT_LIMIT_S, Owner, _process_start


def test_this_process_is_alive_whatever_its_heartbeat() -> None:
    owner = Owner.current()
    assert owner.pid == os.getpid()
    assert owner.alive(heartbeat_age_s=1e9)


def test_a_machine_is_a_boot_and_a_process_namespace_of_it() -> None:
    machine = Owner.current().machine
    assert os.readlink("/proc/self/ns/pid") in machine, "two containers may share their name"
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in machine


def test_a_later_process_with_the_same_number_is_another() -> None:
    owner = dataclasses.replace(Owner.current(), started="1")
    assert not owner.alive(heartbeat_age_s=0)


def test_a_killed_process_is_dead_even_while_nobody_has_waited_for_it() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    mine = Owner.current()
    stat = Path(f"/proc/{child.pid}/stat").read_text()
    owner = Owner(mine.host, mine.machine, child.pid, stat.rpartition(")")[2].split()[19])
    assert owner.alive(heartbeat_age_s=1e9)
    child.kill()
    deadline = time.monotonic() + 120
    while owner.alive(0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.path.exists(f"/proc/{child.pid}"), "the test means a zombie"
    assert not owner.alive(0)
    child.wait()
    assert not owner.alive(0)


def test_elsewhere_the_heartbeat_decides() -> None:
    for change in ({"host": "elsewhere", "machine": ""}, {"machine": "another boot or container"}):
        owner = dataclasses.replace(Owner.current(), pid=2**22 + 1, **change)
        assert owner.alive(HEARTBEAT_LIMIT_S - 1)
        assert not owner.alive(HEARTBEAT_LIMIT_S + 1)


def test_a_process_may_have_any_name() -> None:
    code = (
        "import sys\nopen('/proc/self/comm', 'wb').write(b'caf\\xe9')\n"
        "print(flush=True)\nsys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    started = _process_start(process.pid)
    assert started
    owner = dataclasses.replace(Owner.current(), pid=process.pid, started=started)
    assert owner.alive(heartbeat_age_s=1e9)
    process.communicate()


def test_a_driver_whose_host_is_renamed_keeps_its_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DHCP may."""
    before = Owner.current()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert Owner.current() == before
    # Another process on this machine has begun since.
    monkeypatch.setattr(owners, "_HOST", "another")
    assert before.alive(heartbeat_age_s=1e9)
