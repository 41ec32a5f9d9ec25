"""Several hosts on one machine: names, ssh, rates, Horovod, and nothing left behind."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hvd_autosync.launch.command import OPEN_MPI_5_BINDING, open_mpi_major
from hvd_autosync.testing import Testbed, TestbedError, testbed_missing
from hvd_autosync.testing.testbed import shares_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.skipif(testbed_missing() is not None, reason=str(testbed_missing())),
]

RATE_MBIT = 100.0
NETWORK = ["readlink", "/proc/self/ns/net"]
RECEIVE = """
import socket, sys, time
server = socket.create_server(("", 5001))
print("listening", flush=True)
stream, _ = server.accept()
while stream.recv(1 << 16):
    pass
print(time.monotonic())
"""
SEND = """
import socket, sys, time
stream = socket.create_connection((sys.argv[1], 5001))
print(time.monotonic(), flush=True)
stream.sendall(bytes(int(sys.argv[2])))
"""
ALLREDUCE = """
import os, socket
{first}
import horovod.torch as hvd, torch
hvd.init()
total = hvd.allreduce(torch.ones(1000) * (hvd.rank() + 1), op=hvd.Sum)
print(f"rank {{hvd.rank()}} on {{socket.gethostname()}}: {{total[0].item():.0f}}", flush=True)
"""
HOLD = """
import time
from hvd_autosync.testing import Testbed
with Testbed(rate_mbit=100) as bed:
    bed.popen(["sleep", "1000"], host=1)
    inside = bed.run(["readlink", "/proc/self/ns/net"], capture_output=True, text=True).stdout
    print(inside, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def bed() -> Iterator[Testbed]:
    with Testbed(rate_mbit=RATE_MBIT) as running:
        yield running


def said(bed: Testbed, *command: str, host: int = 0) -> str:
    """What ``command`` prints on a host."""
    done = bed.run(command, host=host, capture_output=True, text=True, check=True)
    return str(done.stdout).strip()


def members(network: str) -> list[int]:
    """Processes in the network namespace ``network``, such as ``net:[4026532]``."""
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if os.readlink(link) == network:
                found.append(int(link.parts[2]))
        except OSError:  # gone meanwhile
            pass
    return found


def await_true(condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def outside() -> dict[str, object]:
    """What a test bed could damage on this machine; what others come and go with is left out."""
    ssh = Path.home() / ".ssh"
    files = ("/etc/hosts", "/etc/shadow", "/etc/ssh/ssh_config")
    own_link = re.compile(r"bridge|port\d*|eth0")
    own_mount = re.compile(rf"/proc|/dev/shm|/run(/testbed.*|/sshd)?|/etc/.*|{re.escape(str(ssh))}")
    return {
        "files": [
            line
            for file in map(Path, files)
            if file.exists()
            for line in file.read_bytes().splitlines()
            if not line.startswith(b"autosync-test-")  # a user of another test
        ],
        "links": sorted(n for _, n in socket.if_nameindex() if own_link.fullmatch(n)),
        "name": socket.gethostname(),
        "mounts": [
            line
            for line in Path("/proc/mounts").read_text().splitlines()
            if own_mount.fullmatch(line.split()[1])
        ],
        "ssh": sorted(p.name for p in ssh.iterdir()) if ssh.is_dir() else None,
        "run": os.path.exists("/run/testbed"),
    }


@pytest.mark.parametrize("host", [0, 1])
def test_hosts_have_names_and_reach_each_other(bed: Testbed, host: int) -> None:
    other = bed.hosts[1 - host]
    assert said(bed, "hostname", host=host) == bed.hosts[host]
    assert said(bed, "getent", "hosts", other, host=host).split() == [
        bed.addresses[1 - host],
        other,
    ]
    plain = ["ssh", "-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=no"]
    assert said(bed, *plain, other, "hostname", host=host) == other


def test_no_way_leads_out(bed: Testbed) -> None:
    assert said(bed, "ip", "route").splitlines() == [
        f"198.18.0.0/24 dev eth0 proto kernel scope link src {bed.addresses[0]}"
    ]


@pytest.mark.parametrize("sender", [0, 1])
def test_links_have_the_rate_in_both_directions(bed: Testbed, sender: int) -> None:
    # Busy processors make a link look slower, never faster: the best of some is the link's.
    measured_mbit: list[float] = []

    def reached() -> bool:
        measured_mbit.append(rate_mbit(bed, sender))
        assert measured_mbit[-1] < 1.05 * RATE_MBIT
        return measured_mbit[-1] > 0.8 * RATE_MBIT

    await_true(reached, 60)


def rate_mbit(bed: Testbed, sender: int) -> float:
    """What a second's worth of bytes travels at, from its sender's first to its receiver's last."""
    size = 12_500_000
    receiver = bed.popen(
        [sys.executable, "-c", RECEIVE], host=1 - sender, stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "listening\n"
    began = said(bed, sys.executable, "-c", SEND, bed.hosts[1 - sender], str(size), host=sender)
    ended = receiver.communicate(timeout=60)[0]
    return 8e-6 * size / (float(ended) - float(began))


def test_each_host_sees_only_its_own_processes_and_shared_memory(bed: Testbed) -> None:
    names = "cat /proc/[0-9]*/comm || true"  # one may end meanwhile
    sleeper = bed.popen(["sleep", "1000"], host=1)
    await_true(lambda: "sleep" in said(bed, "sh", "-c", names, host=1))  # it is env first
    assert "sleep" not in said(bed, "sh", "-c", names)
    sleeper.terminate()
    assert sleeper.wait(120) == -signal.SIGTERM
    said(bed, "touch", "/dev/shm/mine", host=1)
    assert said(bed, "ls", "/dev/shm") == ""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it needs two processors")
def test_each_host_has_its_own_processors(bed: Testbed) -> None:
    look = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
    first, second = (set(said(bed, *look, host=host).split()) for host in (0, 1))
    assert first and second and not first & second
    over_ssh = ["ssh", "-o", "StrictHostKeyChecking=no", bed.hosts[1], sys.executable]
    assert set(said(bed, *over_ssh, "-c", f"'{look[2]}'").split()) == second


@pytest.mark.parametrize(
    ("hosts", "processors", "shares"),
    [
        (2, [0, 1], [[0], [1]]),
        (2, [4, 5, 6, 7, 9], [[4, 5], [6, 7]]),
        (3, [0, 1], [[0], [1], [0]]),
        (2, [3], [[3], [3]]),
    ],
)
def test_hosts_have_equally_many_processors(
    hosts: int, processors: list[int], shares: list[list[int]]
) -> None:
    assert shares_of(processors, hosts) == shares


def test_commands_keep_environment_and_folder(bed: Testbed, tmp_path: Path) -> None:
    done = bed.run(
        ["sh", "-c", "pwd; echo $GREETING"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "GREETING": "hello"},
    )
    assert done.stdout.split() == [str(tmp_path), "hello"]


def test_beds_beside_each_other_do_not_meet(bed: Testbed) -> None:
    with Testbed(hosts=3) as other:
        assert said(other, "ssh", other.hosts[2], "hostname") == "testhost2"
        assert said(bed, *NETWORK) != said(other, *NETWORK)
        assert said(bed, "sh", "-c", "getent hosts testhost2 || echo unknown") == "unknown"
    assert said(bed, "ssh", bed.hosts[1], "hostname") == "testhost1"


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_horovod_runs_across_hosts(bed: Testbed, controller: str, tmp_path: Path) -> None:
    options = ["--gloo"]
    if controller == "mpi":
        pytest.importorskip("mpi4py")
        options = ["--mpi", *([OPEN_MPI_5_BINDING] if (open_mpi_major() or 0) >= 5 else [])]
    script = tmp_path / "allreduce.py"
    script.write_text(ALLREDUCE.format(first="from mpi4py import MPI" * (controller == "mpi")))
    scripts = os.path.dirname(sys.executable)
    done = bed.run(
        [
            sys.executable,
            "-m",
            "horovod.runner.launch",
            *bed.horovodrun_options(),
            *options,
            sys.executable,
            str(script),
        ],
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, host in enumerate(bed.hosts):
        assert f"rank {rank} on {host}: 3" in done.stdout


def test_links_may_differ() -> None:
    with Testbed(hosts=3, rate_mbit=[None, 50, 10]) as bed:
        shown = [said(bed, "tc", "qdisc", "show", "dev", "eth0", host=host) for host in range(3)]
    assert "tbf" not in shown[0]
    assert "rate 50Mbit" in shown[1] and "rate 10Mbit" in shown[2]
    with pytest.raises(ValueError, match="2 rates for 3 hosts"):
        Testbed(hosts=3, rate_mbit=[1, 2])


def test_a_host_can_be_cut_off_and_brought_back(bed: Testbed) -> None:

    def answers(limit_s: int) -> bool:
        greet = ["ssh", "-o", f"ConnectTimeout={limit_s}", bed.hosts[1], "hostname"]
        return bed.run(greet, capture_output=True).returncode == 0

    assert answers(30)
    bed.cut_off(1)
    assert not answers(1)
    bed.bring_back(1)
    await_true(lambda: answers(5))


def test_a_host_can_be_slowed(bed: Testbed) -> None:
    """A busy process is stopped for the rest of the time, and never again afterwards."""
    spinner = bed.popen([sys.executable, "-c", "while True: pass"], host=1)
    process = psutil.Process(spinner.pid)

    def share(looks: int) -> float:
        """How often it may run; how often it does depends on what else this machine has to do."""
        seen = []
        for _ in range(looks):
            seen.append(process.status() != psutil.STATUS_STOPPED)
            time.sleep(0.01)
        return sum(seen) / len(seen)

    assert share(40) == 1
    with bed.slowed(1, 0.25):
        slowed = share(150)
    assert share(40) == 1
    assert 0 < slowed < 0.6
    with pytest.raises(ValueError, match="share"), bed.slowed(1, 1.5):
        pass


def test_nothing_remains_after_the_end() -> None:
    before = outside()
    with Testbed(rate_mbit=RATE_MBIT) as bed:
        orphan = ["sh", "-c", "setsid sleep 1000 & setsid sleep 1000 &"]
        bed.run(orphan, host=1)
        networks = [said(bed, *NETWORK, host=host) for host in (0, 1)]
        assert len(members(networks[1])) > 2
        assert outside() == before
        running = bed.popen(["sleep", "1000"])
        ending = time.monotonic()
    assert time.monotonic() - ending < 30
    assert running.returncode == -signal.SIGKILL
    assert not any(members(network) for network in networks)
    assert outside() == before


@pytest.mark.mpi
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_nothing_remains_of_a_killed_mpirun() -> None:
    """A later host's process of the same number would stumble over it."""
    with Testbed() as bed:
        ranks = ["-np", "2", "-H", "testhost0,testhost1", "--allow-run-as-root"]
        job = bed.popen(
            ["mpirun", *ranks, "sh", "-c", "echo here; exec sleep 1000"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert job.stdout is not None and job.stdout.readline() == "here\n"
        session = said(bed, "sh", "-c", "ls -d /run/testbed/ompi.*").strip()
        assert not Path("/tmp", Path(session).name).exists()
        daemon = said(bed, "sh", "-c", "ls -d /run/testbed/prted.*", host=1).strip()
        assert not Path("/tmp", Path(daemon).name).exists()
        job.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_remains_of_a_killed_owner(number: signal.Signals) -> None:
    before = outside()
    owner = subprocess.Popen(
        # Tests in the background of a shell have SIGINT ignored, and bequeath that.
        ["env", "--default-signal=INT", sys.executable, "-c", HOLD],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    network = owner.stdout.readline().strip()
    assert len(members(network)) > 1
    owner.send_signal(number)
    owner.wait(120)
    await_true(lambda: not members(network))
    assert outside() == before


def test_a_failed_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before, children = outside(), psutil.Process().children()
    monkeypatch.setattr("hvd_autosync.testing.remote_shells._SSHD_CONFIG", "NoSuchWord")
    with pytest.raises(TestbedError, match="NoSuchWord"), Testbed():
        pytest.fail("it must not start")
    assert outside() == before
    assert psutil.Process().children() == children


def test_a_stopped_bed_says_so() -> None:
    with Testbed() as bed:
        pass
    with pytest.raises(TestbedError, match="not running"):
        bed.run(["true"])


@pytest.mark.parametrize("arguments", [{"hosts": 0}, {"hosts": 251}, {"rate_mbit": 0}])
def test_impossible_beds_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Testbed(**arguments)
