"""The command ``hvd-autosync testbed``: up, run, down, and a daemon that is killed."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvd_autosync.testing import TestbedError, daemon, testbed_missing

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.skipif(testbed_missing() is not None, reason=str(testbed_missing())),
]


def testbed(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hvd_autosync.commands.cli", "testbed", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


testbed.__test__ = False  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test bed of someone else's on this machine is left alone.

    There is one for the machine: another run of the tests waits for its turn.
    """
    with open(daemon._STATE.with_suffix(".tests"), "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if daemon.find() is not None:
            pytest.fail("a test bed is up on this machine: hvd-autosync testbed down")
        yield
        daemon.down()


def test_a_file_that_another_user_left_is_no_bed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool) -> None:
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(daemon, "_STATE", tmp_path / "left.json")
        patch.setattr(Path, "unlink", refuse)
        assert not daemon.down()


def test_up_run_down() -> None:
    up = testbed("up", "--hosts", "3", "--rate", "200mbit,100mbit,1gbit")
    assert up.returncode == 0, up.stderr
    assert up.stdout.startswith("up: testhost0, testhost1, testhost2\n")
    assert testbed("run", "--host", "2", "hostname").stdout == "testhost2\n"
    assert testbed("run", "ssh", "testhost1", "hostname").stdout == "testhost1\n"
    assert "rate 1Gbit" in testbed("run", "--host", "2", "tc", "qdisc", "show").stdout
    assert testbed("run", "sh", "-c", "exit 7").returncode == 7
    again = testbed("up")
    assert again.returncode == 1 and "a test bed is running already" in again.stderr
    assert testbed("down").stdout == "down\n"
    assert testbed("down").stdout == "no test bed was up\n"
    gone = testbed("run", "hostname")
    assert gone.returncode != 0 and "testbed up" in gone.stderr


def test_horovodrun_is_given_all_hosts() -> None:
    kept = daemon.TestbedDaemon(1, 1, ("a", "b"), (os.getpid(),) * 2, ("-H", "a:1,b:1"))
    with pytest.raises(TestbedError, match="no host 2"):
        kept.command(["hostname"], host=2)


@pytest.mark.slow
def test_a_job_runs_over_the_hosts(horovodrun: str, tmp_path: Path) -> None:
    script = tmp_path / "greet.py"
    script.write_text(
        "import socket, horovod.torch as hvd\nhvd.init()\n"
        "print('rank', hvd.rank(), 'of', hvd.size(), 'on', socket.gethostname())\n"
    )
    assert testbed("up", "--slots", "2").returncode == 0
    done = testbed("run", horovodrun, "--gloo", sys.executable, str(script))
    assert done.returncode == 0, done.stderr
    for rank, host in enumerate(["testhost0", "testhost0", "testhost1", "testhost1"]):
        assert f"rank {rank} of 4 on {host}" in done.stdout


def test_a_killed_daemon_leaves_nothing_and_the_next_comes_up() -> None:
    assert testbed("up").returncode == 0
    first = daemon.find()
    assert first is not None
    os.kill(first.daemon, signal.SIGKILL)
    assert testbed("up").returncode == 0
    second = daemon.find()
    assert second is not None and second.daemon != first.daemon
    assert testbed("run", "--host", "1", "hostname").stdout == "testhost1\n"
    assert not any(runs(pid) for pid in first.pids)


def runs(pid: int) -> bool:
    """Whether a process is there and more than a dead one that nobody has asked for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--rate", "fast"], "invalid rate 'fast'"), (["--rate", "1mbit,2mbit,3mbit"], "3 rates")],
)
def test_rates_that_cannot_be_used_are_named(words: list[str], named: str) -> None:
    done = testbed("up", *words)
    assert done.returncode != 0 and named in done.stderr
