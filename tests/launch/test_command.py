"""Launches that the system refuses, and one that does not end when it is asked to."""

import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hvd_autosync.engine.training import run_training
from hvd_autosync.errors import AutosyncError
from hvd_autosync.launch import command
from hvd_autosync.launch.cold import ColdRunner
from hvd_autosync.launch.command import launcher_environment
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.search_space import Host, Strategy, TrialSpec

JOB = Job(("-np", "1", "--gloo"), (sys.executable, "-c", ""), (Host("localhost", 1),), "gloo")


def trial() -> None:
    ColdRunner(JOB).run(TrialSpec("t", Strategy()), Limits(), lambda progress: None)


@pytest.mark.parametrize("start", [trial, lambda: run_training(JOB, Strategy())])
def test_an_environment_that_is_too_large_is_reported(
    start: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LARGE", uuid.uuid4().hex * 5000)
    with pytest.raises(AutosyncError, match=r"cannot be launched: .*too long") as caught:
        start()
    assert "Unset large variables" in caught.value.hint


def test_ranks_get_neither_a_password_nor_the_tuning_of_another_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Horovod writes variables on command lines; and a fork server would be tuned live."""
    monkeypatch.setenv("HVD_AUTOSYNC_STORE", "postgresql://me:secret@database/traces")
    monkeypatch.setenv("HVD_AUTOSYNC_LIVE", "1")
    assert not {"HVD_AUTOSYNC_STORE", "HVD_AUTOSYNC_LIVE"} & {*launcher_environment(Strategy())}
    monkeypatch.setenv("HVD_AUTOSYNC_STORE", "traces.db")
    assert launcher_environment(Strategy())["HVD_AUTOSYNC_STORE"] == "traces.db"


@pytest.mark.parametrize("own", [None, "0"])
def test_a_process_that_names_itself_keeps_the_variables_by_which_it_is_found(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPT_NOENV", own or "")
    if own is None:
        monkeypatch.delenv("SPT_NOENV")
    code = "import os; print(os.environ['SPT_NOENV'])"
    monkeypatch.setattr(command, "launcher_command", lambda *_: [sys.executable, "-c", code])
    launcher = command.start_launcher(JOB, Strategy(), TrialSpec("t", Strategy()))
    out, _ = launcher.communicate(timeout=60)
    assert out.decode().strip() == (own or "1")


STUCK = """
import os, signal, threading, time
from types import SimpleNamespace
from hvd_autosync import bootstrap
asked = threading.Event()

def sleep(seconds):  # its patience ends when it was asked, however late that is
    asked.wait(120) if seconds == bootstrap._PATIENCE_S else time.sleep(0.1)

def ask(*_):
    print("asked", flush=True)
    asked.set()

signal.signal(signal.SIGTERM, ask)
bootstrap.time = SimpleNamespace(sleep=sleep)
bootstrap._end_with(os.getppid())
print(os.getpid(), flush=True)
while True:
    time.sleep(0.1)
"""
DRIVER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STUCK!r}])"


def test_a_launcher_that_is_stuck_does_not_outlive_its_driver() -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        launcher = psutil.Process(int(driver.stdout.readline()))
        driver.kill()
        assert driver.stdout.read() == b"asked\n"  # and its pipe has ended
    gone, _ = psutil.wait_procs([launcher], timeout=30)
    assert gone


def test_the_version_of_mpi_may_be_said_in_any_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        "#!/bin/sh\nprintf 'r\\351serv\\351\\n'; printf '\\351\\n' >&2\n"
        "echo 'mpirun (Open MPI) 5.0.11'\n"
    )
    mpirun.chmod(0o755)
    monkeypatch.setattr(command, "search_path", lambda: str(tmp_path))
    assert command.open_mpi_major.__wrapped__() == 5
