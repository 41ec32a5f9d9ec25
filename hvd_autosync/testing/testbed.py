"""Several hosts on one machine, joined by links of a chosen rate, for tests and benchmarks.

Each host has its own network, name, processes and ``sshd``; the hosts share this machine's files
and processors. They reach each other and nothing else: their addresses belong to the range for
benchmarks (RFC 2544), and no route leads out::

    with Testbed(hosts=2, rate_mbit=100) as bed:
        bed.run(["horovodrun", *bed.horovodrun_options(), "--gloo", "python", "train.py"])

It needs root. Nothing remains after it, even when its owner is killed: see
:mod:`hvd_autosync.testing.namespaces`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import TracebackType
from typing import Any

from hvd_autosync.testing.namespaces import Box, TestbedError

_TOOLS = ("ip", "mount", "nsenter", "ssh", "ssh-keygen", "sshd", "tc", "unshare")
_TOOL_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_FOLDER = "/run/testbed"
_KEY = f"{_FOLDER}/key"
#: Hosts number their processes from 1 and share ``/tmp``, where Open MPI names what it leaves by
#: host and process: a killed one's would stop a later one (PMIx's listener fails to start).
_ENVIRONMENT = {"PRTE_MCA_prte_tmpdir_base": _FOLDER}
_SSHD_S = 10.0
#: Bytes that a link lets through at once: those of this time at its rate, and two frames at least.
_BURST_S, _LEAST_BURST = 1e-3, 3200
#: A slowed host stops and runs once in so many seconds.
_SLICE_S = 0.1

_PROBE = (
    "ip link add name bridge type bridge && ip link add name port type veth peer name eth0 && "
    "tc qdisc add dev port root tbf rate 1mbit burst 10kb latency 50ms && "
    "mount -t tmpfs tmpfs /run"
)
_PREPARE = f"""
[ ! -e /proc/sys/net/ipv6 ] || echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mkdir -p /run/sshd {_FOLDER}/ssh
"""
#: A root account whose password is locked may not log in by key either, hence its own shadow.
_START = f"""
mount --bind {_FOLDER}/hosts /etc/hosts
mount --bind {_FOLDER}/shadow /etc/shadow
mount --bind {_FOLDER}/ssh /etc/ssh
[ ! -d "$1/.ssh" ] || mount -t tmpfs -o mode=700 tmpfs "$1/.ssh"
$(command -v sshd) -f {_FOLDER}/ssh/sshd_config -E {_FOLDER}/sshd.log || {{
    cat {_FOLDER}/sshd.log >&2
    exit 1
}}
"""
_SSHD_CONFIG = f"""
HostKey {_KEY}
AuthorizedKeysFile {_KEY}.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
PidFile none
MaxStartups 100
SetEnv {{environment}}
"""
_SSH_CONFIG = f"""
IdentityFile {_KEY}
GlobalKnownHostsFile {_FOLDER}/known_hosts
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


@cache
def testbed_missing() -> str | None:
    """Why a test bed cannot be made here, or ``None`` when it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in _TOOLS if shutil.which(tool, path=_TOOL_PATH) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (packages iproute2, openssh-server, util-linux)"
    enter = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--mount-proc"]
    tried = subprocess.run(
        [*enter, "sh", "-c", _PROBE],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": _TOOL_PATH},
    )
    return f"the kernel refuses: {tried.stderr.strip()}" if tried.returncode else None


class Testbed:
    """Hosts, and links between them; a context manager.

    Args:
        hosts: Number of hosts, at most 250.
        rate_mbit: Rate of the hosts' links, in each direction, in Mbit/s; ``None``: unlimited.
            One for all, or one for each host.

    Attributes:
        hosts: Their names, ``testhost0`` and so on. Every host resolves all of them.
        addresses: Their addresses, in the same order.

    Raises:
        TestbedError: On entering, when it cannot be made here.
    """

    __test__ = False  # pytest collects classes by their name

    def __init__(
        self, hosts: int = 2, rate_mbit: float | Sequence[float | None] | None = None
    ) -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"hosts must be from 1 to 250, not {hosts}")
        rates = list(rate_mbit) if isinstance(rate_mbit, Sequence) else [rate_mbit] * hosts
        if len(rates) != hosts:
            raise ValueError(f"{len(rates)} rates for {hosts} hosts")
        if any(rate is not None and not rate > 0 for rate in rates):
            raise ValueError(f"rate_mbit must be more than 0, not {rate_mbit}")
        self.hosts = tuple(f"testhost{i}" for i in range(hosts))
        self.addresses = tuple(f"198.18.0.{i + 1}" for i in range(hosts))
        self._rates = rates
        self._boxes: list[Box] = []
        self._switch: Box | None = None
        self._exit = ExitStack()

    def __enter__(self) -> Testbed:
        missing = testbed_missing()
        if missing:
            raise TestbedError(f"no test bed here: {missing}", hint="Run as root on Linux.")
        with self._exit as exit_now:
            switch = self._switch = self._open(Box("testbed-switch"))
            _ip(switch, "link add name bridge type bridge", "link set dev bridge up")
            self._boxes = [self._open(Box(name)) for name in self.hosts]
            for index in range(len(self.hosts)):
                self._plug(index, switch)
            self._start_hosts()
            self._exit = exit_now.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exit.close()
        self._boxes, self._switch = [], None

    def _open(self, box: Box) -> Box:
        self._exit.callback(box.close)
        return box

    def _plug(self, index: int, switch: Box) -> None:
        """Join a host to the switch, each end of the cable limiting what it sends."""
        host, port = self._boxes[index], f"port{index}"
        subprocess.run(
            [
                "ip",
                "link",
                "add",
                "name",
                port,
                "netns",
                str(switch.pid),
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                str(host.pid),
            ],
            check=True,
            env={"PATH": _TOOL_PATH},
        )
        _ip(switch, f"link set dev {port} master bridge up")
        _ip(
            host,
            f"addr add {self.addresses[index]}/24 dev eth0",
            "link set dev eth0 up",
            "link set dev lo up",
        )
        rate_mbit = self._rates[index]
        if rate_mbit is not None:
            _limit(switch, port, rate_mbit)
            _limit(host, "eth0", rate_mbit)

    def _start_hosts(self) -> None:
        """Give every host the same names and keys, and start its ``sshd``."""
        first = self._boxes[0]
        for box in self._boxes:
            _tool(box, "sh", "-ec", _PREPARE)
        _tool(first, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", _KEY)
        key, public = first.read(_KEY), first.read(f"{_KEY}.pub")
        names = [f"{a} {n}" for a, n in zip(self.addresses, self.hosts, strict=True)]
        # Where Open MPI's daemon on another host finds its programs.
        path = os.pathsep.join([os.path.dirname(sys.executable), _TOOL_PATH])
        files = {
            "hosts": "\n".join(["127.0.0.1 localhost", *names, ""]),
            "shadow": "root:*:19000:0:99999:7:::\nsshd:!:19000::::::\n",
            "known_hosts": f"testhost*,198.18.0.* {public}",
            "key": key,
            "key.pub": public,
            "ssh/ssh_config": _SSH_CONFIG,
            "ssh/sshd_config": _SSHD_CONFIG.format(
                environment=" ".join(
                    f'{name}="{value}"' for name, value in {"PATH": path, **_ENVIRONMENT}.items()
                )
            ),
        }
        for box in self._boxes:
            for name, text in files.items():
                box.write(f"{_FOLDER}/{name}", text, 0o600 if name in ("key", "shadow") else 0o644)
            _tool(box, "sh", "-ec", _START, "sh", pwd.getpwuid(0).pw_dir)
        deadline = time.monotonic() + _SSHD_S
        while any(22 not in box.listening_ports for box in self._boxes):
            if time.monotonic() > deadline:
                logs = "".join(box.read(f"{_FOLDER}/sshd.log") for box in self._boxes)
                raise TestbedError(f"sshd does not listen: {logs.strip()}", hint="Try sshd -t.")
            time.sleep(0.01)

    def _box(self, host: int) -> Box:
        if not self._boxes:
            raise TestbedError("the test bed is not running", hint="Use it in a with statement.")
        return self._boxes[host]

    def run(
        self, command: Sequence[str], *, host: int = 0, **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """:func:`subprocess.run` on a host, the first unless told otherwise.

        Args:
            command: Program and arguments.
            host: Index of the host.
            options: Those of :func:`subprocess.run`, ``env`` and ``cwd`` among them.
        """
        return self._box(host).run(command, **_with_environment(options))

    def popen(
        self, command: Sequence[str], *, host: int = 0, **options: Any
    ) -> subprocess.Popen[Any]:
        """:class:`subprocess.Popen` on a host; what still runs when the test bed ends is killed.

        Args:
            command: Program and arguments.
            host: Index of the host.
            options: Those of :class:`subprocess.Popen`, ``env`` and ``cwd`` among them.
        """
        return self._box(host).popen(command, **_with_environment(options))

    @property
    def pids(self) -> tuple[int, ...]:
        """For each host a process whose namespaces are the host's, for ``nsenter --target``."""
        return tuple(box.pid for box in self._boxes)

    def cut_off(self, host: int) -> None:
        """Pull a host's cable: nothing reaches it, nothing leaves it, and nobody is told."""
        self._set_cable(host, "down")

    def bring_back(self, host: int) -> None:
        """Plug the cable in again."""
        self._set_cable(host, "up")

    def _set_cable(self, host: int, state: str) -> None:
        self._box(host)  # in a running test bed only
        assert self._switch is not None
        _ip(self._switch, f"link set dev port{host} {state}")

    @contextmanager
    def slowed(self, host: int, share: float) -> Iterator[None]:
        """Meanwhile all processes of a host together get ``share`` of one processor at most.

        They are stopped and continued many times a second: a quota of a control group would need
        a hierarchy that this process may write to.

        Args:
            host: Index of the host.
            share: Above 0, below 1.
        """
        if not 0 < share < 1:
            raise ValueError(f"share must be between 0 and 1, not {share}")
        box, ended = self._box(host), threading.Event()
        thread = threading.Thread(target=_throttle, args=(box, share, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def horovodrun_options(self, slots: int = 1) -> list[str]:
        """Options with which ``horovodrun``, started on the first host, uses all hosts.

        Args:
            slots: Ranks on each host.
        """
        layout = ",".join(f"{name}:{slots}" for name in self.hosts)
        # The cache would lie in the user's home, and names of hosts come back in other test beds.
        return [
            "-np",
            str(slots * len(self.hosts)),
            "-H",
            layout,
            "-i",
            _KEY,
            "--network-interfaces",
            "eth0",
            "--disable-cache",
        ]


def _with_environment(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "env": {**(options.get("env") or os.environ), **_ENVIRONMENT}}


def _throttle(box: Box, share: float, ended: threading.Event) -> None:
    """Stop and continue the processes of ``box`` in turn until ``ended``, then continue them."""
    while not ended.is_set():
        box.signal_all(signal.SIGSTOP)
        ended.wait(_SLICE_S * (1 - share))
        box.signal_all(signal.SIGCONT)
        ended.wait(_SLICE_S * share)


def _tool(box: Box, *command: str, text: str = "") -> None:
    """Run a system tool inside ``box``.

    Raises:
        TestbedError: It failed.
    """
    environment: Mapping[str, str] = {"PATH": _TOOL_PATH}
    done = box.run(command, env=environment, cwd="/", input=text, capture_output=True, text=True)
    if done.returncode:
        raise TestbedError(
            f"{command[0]} failed: {done.stderr.strip()}",
            hint="Ask testbed_missing() for what this machine lacks.",
        )


def _ip(box: Box, *commands: str) -> None:
    _tool(box, "ip", "-batch", "-", text="\n".join([*commands, ""]))


def _limit(box: Box, interface: str, rate_mbit: float) -> None:
    """Limit what leaves through ``interface``; up to 200 ms of it may wait.

    Less, and a burst of one message loses packets: the rate set would not be the rate had.
    """
    bits_per_s = round(rate_mbit * 1e6)
    burst = max(round(bits_per_s / 8 * _BURST_S), _LEAST_BURST)
    _tool(
        box,
        "tc",
        "qdisc",
        "add",
        "dev",
        interface,
        "root",
        "tbf",
        "rate",
        f"{bits_per_s}bit",
        "burst",
        str(burst),
        "latency",
        "200ms",
    )
