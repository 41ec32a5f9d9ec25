"""A test bed without root: a user namespace, and a stand-in for ssh between its hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvd_autosync.testing import Testbed, TestbedError, run_as_namespace_root, testbed_missing

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.skipif(
        testbed_missing(ssh=False) is not None, reason=str(testbed_missing(ssh=False))
    ),
]

PROGRAM = """
import os, sys
from hvd_autosync.testing import Testbed, run_as_namespace_root
if sys.argv[1] == "outside":
    print("user", os.geteuid(), flush=True)
    sys.exit(run_as_namespace_root([sys.executable, __file__, "inside", *sys.argv[2:]]))
with Testbed(rate_mbit=100, ssh=False) as bed:
    sys.exit(bed.run(sys.argv[2:]).returncode)
"""


@pytest.fixture
def command(as_nobody: list[str], tmp_path: Path) -> list[str]:
    """Runs a command on the first host of a user's test bed."""
    home = Path(as_nobody[-1].partition("=")[2])
    program = home / "program.py"
    program.write_text(PROGRAM)
    return [*as_nobody, sys.executable, str(program), "outside"]


def said(command: list[str], script: str) -> list[str]:
    done = subprocess.run([*command, "sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_hosts_of_a_user_have_names_networks_and_a_rate(command: list[str]) -> None:
    look = "hostname; ip -o addr show dev eth0 | grep -o 198[.0-9]*; readlink /proc/self/ns/net"
    user, *seen = said(
        command, f"({look}); ssh -o A=b testhost1 -p 9 -i key '{look}'; tc qdisc show dev eth0"
    )
    assert user == "user 65534"
    assert seen[:2] == ["testhost0", "198.18.0.1"] and seen[3:5] == ["testhost1", "198.18.0.2"]
    assert seen[2] != seen[5]
    assert "rate 100Mbit" in seen[6]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it needs two processors")
def test_hosts_of_a_user_have_their_own_processors(command: list[str]) -> None:
    look = "grep Cpus_allowed_list /proc/self/status"
    _, first, second = said(command, f"{look}; ssh testhost1 {look}")
    assert first != second


def test_the_stand_in_passes_on_words_input_and_status(command: list[str]) -> None:
    script = "echo in | ssh testhost1 'cat; exit 7'; echo $?; ssh testhost1 echo 'a   b'; "
    assert said(command, script)[1:] == ["in", "7", "a b"]
    assert said(command, "ssh elsewhere true || echo $?")[1:] == ["255"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_its_owner(command: list[str], number: int) -> None:
    """Neither on the first host nor on the second."""
    mark = f"{3600 + number}.{time.time_ns() % 10**6}"
    script = f"ssh testhost1 'sleep {mark} & echo there; sleep {mark}'"
    with subprocess.Popen([*command, "sh", "-c", script], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert [owner.stdout.readline() for _ in range(2)] == [b"user 65534\n", b"there\n"]
        assert running(mark)
        owner.send_signal(number)
    deadline = time.monotonic() + 120
    while left := running(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def running(word: str) -> list[str]:
    """Command lines of this machine in which ``word`` occurs."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # gone meanwhile
            continue
        if word in text:
            found.append(text)
    return found


def test_the_status_of_the_command_is_returned() -> None:
    assert run_as_namespace_root(["sh", "-c", "exit 5"]) == 5
    assert run_as_namespace_root(["sh", "-c", 'exit "$(id -u)"']) == 0


def test_a_host_without_own_processes_is_not_slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Testbed(ssh=False)
    with pytest.raises(TestbedError, match="cannot be slowed"), bed.slowed(0, 0.5):
        pass
