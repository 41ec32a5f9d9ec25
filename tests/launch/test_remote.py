"""Commands on other hosts."""

from __future__ import annotations

import subprocess
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
    left = [each for each in psutil.process_iter(["cmdline"]) if mark in str(each.info["cmdline"])]
    assert not [each for each in left if each.status() != psutil.STATUS_ZOMBIE]


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
