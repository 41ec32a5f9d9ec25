"""Commands on other hosts."""

from __future__ import annotations

import contextlib
import subprocess
import time
import uuid

import psutil
import pytest

from hvd_autosync.launch import remote
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Host


def test_a_host_that_does_not_answer_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell has a child, as ssh is one."""
    mark = uuid.uuid4().hex
    monkeypatch.setattr(
        "horovod.runner.util.remote.get_remote_command",
        lambda *_, **__: f"sh -c 'sleep 1000; : {mark}' && true",
    )
    monkeypatch.setattr(remote, "_CONNECT_S", 0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        remote.run_on("b", "true")
    until = time.monotonic() + 60  # it was signalled, and may not have ended
    while _processes_of(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _processes_of(mark)


def _processes_of(mark: str) -> list[int]:
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if mark in str(each.cmdline()) and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each.pid)
    return found


def test_python_there_gets_what_it_may_need_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def run_on(host: str, line: str, ssh: object) -> subprocess.CompletedProcess[str]:
        sent.append(line)
        return subprocess.CompletedProcess(line, 0, "", "")

    monkeypatch.setattr(remote, "run_on", run_on)
    monkeypatch.setattr(remote, "remote_hosts", lambda job: [Host("b", 1)])
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/my python/lib")
    monkeypatch.delenv("PYTHONHOME", raising=False)
    job = Job((), ("python", "train.py"), (Host("b", 1),))
    remote.hosts_without_package(job)
    remote.sweep_remote_hosts(job, "nosuch")
    assert len(sent) == 2
    for line in sent:
        assert line.startswith("env 'LD_LIBRARY_PATH=/opt/my python/lib' ")
        assert "PYTHONHOME" not in line
