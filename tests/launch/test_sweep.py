"""Processes of a trial are found, whatever they are called."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from hvd_autosync.launch import sweep
from hvd_autosync.launch.sweep import _runs_in, end_launch, processes_of
from hvd_autosync.search_space.trial import TRAINING

#: Of no other run of the tests on this machine, whose processes are seen, too.
NAME = f"test-sweep-{uuid.uuid4().hex}"
_CODE = """
import sys
with open("/proc/self/comm", "wb") as name:
    name.write(b"caf\\xe9")
print(flush=True)
sys.stdin.read()
"""


def test_a_process_may_have_any_name() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"HVD_AUTOSYNC_TRIAL_ID": NAME},
    )
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    assert processes_of(NAME) == [process.pid]
    process.communicate()
    assert processes_of(NAME) == []


def test_a_training_in_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    for trial_id, waits in (("some-trial", True), (TRAINING, False)):
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"HVD_AUTOSYNC_TRIAL_ID": trial_id},
        )
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        assert _runs_in(str(tmp_path.resolve())) is waits
        process.communicate()


def test_a_process_that_starts_a_program_meanwhile_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no environment at that moment."""
    seen = [[], [4321], [], []]
    killed = []
    monkeypatch.setattr(sweep, "processes_of", lambda *_, **__: seen.pop(0))
    monkeypatch.setattr(sweep.os, "kill", lambda pid, _: killed.append(pid))
    assert sweep.sweep(NAME, launcher=1) == 1
    assert killed == [4321] and not seen


_SEMAPHORES = """
import multiprocessing, sys
event = multiprocessing.get_context("spawn").Event()
for part in (event._cond._lock, event._flag):
    print(part._semlock.name.lstrip("/"), end=" ")
print(flush=True)
sys.stdin.read()
"""


def test_semaphores_of_a_process_that_is_killed_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own process for that is not killed with it."""
    monkeypatch.setattr(sweep, "_TRACKER_S", 120.0)  # it may have only just begun to start
    monkeypatch.setattr(sweep, "_PATIENCE_S", 240.0)
    process = subprocess.Popen(
        [sys.executable, "-c", _SEMAPHORES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"HVD_AUTOSYNC_TRIAL_ID": NAME},
    )
    assert process.stdout is not None
    names = process.stdout.readline().decode().split()
    files = [Path("/dev/shm") / f"sem.{name}" for name in names]
    assert len(files) == 2 and all(file.exists() for file in files)
    assert sweep.sweep(NAME) == 1
    process.communicate()
    assert not any(file.exists() for file in files)
    assert processes_of(NAME) == []


_LAUNCHER = """
import signal, subprocess, sys
command = ["sh", "-c", "trap '' TERM; echo; exec sleep 60"]
rank = subprocess.Popen(command, stdout=subprocess.PIPE)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
rank.stdout.readline()
print(flush=True)
signal.sigwait([signal.SIGTERM])
sys.exit(-rank.wait())
"""


@pytest.mark.parametrize("variable", ["PMIX_RANK", "OMPI_COMM_WORLD_RANK"])
def test_a_launcher_in_a_batch_systems_shell_ends_after_its_ranks(variable: str) -> None:
    """Like ``mpirun``, which inherits the rank of that shell."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER],
        stdout=subprocess.PIPE,
        env=os.environ | {"HVD_AUTOSYNC_TRIAL_ID": NAME, variable: "0"},
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    end_launch(process, NAME)
    assert process.returncode == signal.SIGKILL, "the status by which it says how its rank ended"
    assert processes_of(NAME) == []
