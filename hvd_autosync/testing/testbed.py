"""Several hosts on one machine, joined by links of a chosen rate, for tests and benchmarks.

Each host has its own network, name, processes and ``sshd``, and a part of this machine's
processors; they have its files in common. They can reach only each other: their addresses belong
to the range for benchmarks (RFC 2544), and there is no route to other networks::

    with Testbed(hosts=2, rate_mbit=100) as bed:
        bed.run(["horovodrun", *bed.horovodrun_options(), "--gloo", "python", "train.py"])

It needs root. It leaves nothing behind, even if its owner is killed: see
:mod:`hvd_autosync.testing.namespaces`. Without root, a program that
:func:`~hvd_autosync.testing.namespaces.run_as_namespace_root` runs can make one with ``ssh=False``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import TracebackType
from typing import Any

from hvd_autosync.testing.namespaces import TOOL_PATH, Box, TestbedError, run_tool
from hvd_autosync.testing.remote_shells import (
    ENVIRONMENT,
    FOLDER,
    KEY,
    SSH_TOOLS,
    STAND_IN_FOLDER,
    install_stand_in,
    start_sshd,
)
from hvd_autosync.util.amounts import amount

_TOOLS = ("hostname", "ip", "mount", "nsenter", "taskset", "tc", "unshare")
#: Burst of a link: its bytes in this time, and at least two frames.
_BURST_S, _LEAST_BURST = 1e-3, 3200
#: Period in which a slowed host stops and runs once, seconds.
_SLICE_S = 0.1

_PROBE = (
    "ip link add name bridge type bridge && ip link add name port type veth peer name eth0 && "
    "tc qdisc add dev port root tbf rate 1mbit burst 10kb latency 50ms && "
    "hostname probe && mount -t tmpfs tmpfs /run"
)
_PREPARE = f"""
[ ! -e /proc/sys/net/ipv6 ] || echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mkdir -p {FOLDER}
cat > {FOLDER}/hosts
mount --bind {FOLDER}/hosts /etc/hosts
"""


@cache
def testbed_missing(*, ssh: bool = True) -> str | None:
    """Return why a test bed cannot be made here, or ``None`` if it can.

    Args:
        ssh: As for :class:`Testbed`; with ``False``, whether this user can make one by
            :func:`~hvd_autosync.testing.namespaces.run_as_namespace_root`.
    """
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if ssh and os.geteuid() != 0:
        return "network namespaces need root"
    tools = (*_TOOLS, *(SSH_TOOLS if ssh else ()))
    absent = [tool for tool in tools if shutil.which(tool, path=TOOL_PATH) is None]
    if absent:
        packages = f"iproute2,{' openssh-server,' if ssh else ''} util-linux, hostname"
        return f"not installed: {', '.join(absent)} (packages {packages})"
    enter = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--mount-proc"]
    if not ssh:
        enter += ["--user", "--map-root-user"]
    tried = subprocess.run(
        [*enter, "sh", "-c", _PROBE],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": TOOL_PATH},
    )
    return f"the kernel refuses: {tried.stderr.strip()}" if tried.returncode else None


def shares_of(processors: Sequence[int], hosts: int) -> list[Sequence[int]]:
    """Divide processors among hosts: as many for each; hosts share one where there are too few."""
    each = max(len(processors) // hosts, 1)
    starts = (host * each % len(processors) for host in range(hosts))
    return [processors[start : start + each] for start in starts]


class Testbed:
    """Hosts, and links between them; a context manager.

    Args:
        hosts: Number of hosts, at most 250.
        rate_mbit: Rate of the hosts' links, in each direction, in Mbit/s; ``None``: unlimited.
            One for all, or one for each host.
        ssh: Start processes on other hosts through an ``sshd`` on each. Otherwise hosts see each
            other's processes, and a program that takes the place of ``ssh`` enters the other host.

    Attributes:
        hosts: Names of the hosts, ``testhost0`` and so on. Every host resolves all of them.
        addresses: Addresses of the hosts, in the same order.

    Raises:
        TestbedError: The test bed cannot be made here; raised on entering the context.
    """

    __test__ = False  # pytest collects classes by their name

    def __init__(
        self,
        hosts: int = 2,
        rate_mbit: float | Sequence[float | None] | None = None,
        *,
        ssh: bool = True,
    ) -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"hosts must be from 1 to 250, not {hosts}")
        rates = list(rate_mbit) if isinstance(rate_mbit, Sequence) else [rate_mbit] * hosts
        if len(rates) != hosts:
            raise ValueError(f"{amount(len(rates), 'rate')} for {amount(hosts, 'host')}")
        if any(rate is not None and not rate > 0 for rate in rates):
            raise ValueError(f"rate_mbit must be more than 0, not {rate_mbit}")
        self.hosts = tuple(f"testhost{i}" for i in range(hosts))
        self.addresses = tuple(f"198.18.0.{i + 1}" for i in range(hosts))
        self._rates = rates
        self._ssh = ssh
        self._boxes: list[Box] = []
        self._switch: Box | None = None
        self._exit = ExitStack()

    def __enter__(self) -> Testbed:
        missing = testbed_missing(ssh=self._ssh)
        if missing:
            raise TestbedError(f"cannot make a test bed: {missing}", hint="Run as root on Linux.")
        with self._exit as exit_now:
            switch = self._switch = self._open("testbed-switch")
            _ip(switch, "link add name bridge type bridge", "link set dev bridge up")
            shares = shares_of(sorted(os.sched_getaffinity(0)), len(self.hosts))
            for name, share in zip(self.hosts, shares, strict=True):
                self._boxes.append(self._open(name, share))
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

    def _open(self, name: str, processors: Sequence[int] | None = None) -> Box:
        box = Box(name, processes=self._ssh, processors=processors)
        self._exit.callback(box.close)
        return box

    def _plug(self, index: int, switch: Box) -> None:
        """Connect a host to the switch; each end of the cable limits the rate at which it sends."""
        host, port = self._boxes[index], f"port{index}"
        ends = f"{port} netns {switch.pid} type veth peer name eth0 netns {host.pid}"
        run_tool(None, "ip", "link", "add", "name", *ends.split())
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
        """Give every host the same names, and a way to start processes on the others."""
        names = [f"{a} {n}" for a, n in zip(self.addresses, self.hosts, strict=True)]
        known = "\n".join(["127.0.0.1 localhost", *names, ""])
        for box in self._boxes:
            run_tool(box, "sh", "-ec", _PREPARE, text=known)
        if self._ssh:
            start_sshd(self._boxes)
        else:
            install_stand_in(dict(zip(self.hosts, self._boxes, strict=True)))

    def _box(self, host: int) -> Box:
        if not self._boxes:
            raise TestbedError("the test bed is not running", hint="Use it in a with statement.")
        return self._boxes[host]

    def run(
        self, command: Sequence[str], *, host: int = 0, **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Call :func:`subprocess.run` on a host.

        Args:
            command: Program and arguments.
            host: Index of the host.
            options: Options of :func:`subprocess.run`, including ``env`` and ``cwd``.
        """
        return self._box(host).run(command, **self._with_environment(options))

    def popen(
        self, command: Sequence[str], *, host: int = 0, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a :class:`subprocess.Popen` on a host; the end of the test bed kills it.

        Args:
            command: Program and arguments.
            host: Index of the host.
            options: Options of :class:`subprocess.Popen`, including ``env`` and ``cwd``.
        """
        return self._box(host).popen(command, **self._with_environment(options))

    def _with_environment(self, options: dict[str, Any]) -> dict[str, Any]:
        env = {**(options.get("env") or os.environ), **ENVIRONMENT}
        if not self._ssh:
            env["PATH"] = f"{STAND_IN_FOLDER}{os.pathsep}{env.get('PATH', TOOL_PATH)}"
        return {**options, "env": env}

    @property
    def pids(self) -> tuple[int, ...]:
        """A process id for each host, whose namespaces are the host's, for ``nsenter --target``."""
        return tuple(box.pid for box in self._boxes)

    def cut_off(self, host: int) -> None:
        """Disconnect a host's cable: packets to and from the host are lost without an error."""
        self._set_cable(host, "down")

    def bring_back(self, host: int) -> None:
        """Reconnect a host's cable."""
        self._set_cable(host, "up")

    def _set_cable(self, host: int, state: str) -> None:
        self._box(host)  # raises if the test bed is not running
        assert self._switch is not None
        _ip(self._switch, f"link set dev port{host} {state}")

    @contextmanager
    def slowed(self, host: int, share: float) -> Iterator[None]:
        """Limit all processes of a host together to ``share`` of one processor.

        They are stopped and continued many times a second, because a quota needs a writable
        control-group hierarchy.

        Args:
            host: Index of the host.
            share: Share of one processor, above 0 and below 1.
        """
        if not 0 < share < 1:
            raise ValueError(f"share must be between 0 and 1, not {share}")
        if not self._ssh:
            raise TestbedError(
                "a host without processes of its own cannot be slowed",
                hint="Use ssh=True, as root.",
            )
        box, ended = self._box(host), threading.Event()
        thread = threading.Thread(target=_throttle, args=(box, share, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def horovodrun_options(self, slots: int = 1) -> list[str]:
        """Return the options for ``horovodrun`` on the first host to use all hosts.

        Args:
            slots: Number of ranks on each host.
        """
        layout = ",".join(f"{name}:{slots}" for name in self.hosts)
        # Horovod's cache is in the user's home, and other test beds have the same host names.
        return [
            "-np",
            str(slots * len(self.hosts)),
            "-H",
            layout,
            *(("-i", KEY) if self._ssh else ()),
            "--network-interfaces",
            "eth0",
            "--disable-cache",
        ]


def _throttle(box: Box, share: float, ended: threading.Event) -> None:
    """Stop and continue the processes of ``box`` in turn until ``ended``, then continue them."""
    while not ended.is_set():
        box.signal_all(signal.SIGSTOP)
        ended.wait(_SLICE_S * (1 - share))
        box.signal_all(signal.SIGCONT)
        ended.wait(_SLICE_S * share)


def _ip(box: Box, *commands: str) -> None:
    run_tool(box, "ip", "-batch", "-", text="\n".join([*commands, ""]))


def _limit(box: Box, interface: str, rate_mbit: float) -> None:
    """Limit the rate at which ``interface`` sends, with a queue of up to 200 ms.

    With a shorter queue the burst of one message loses packets, and the rate is below the limit.
    """
    bits_per_s = round(rate_mbit * 1e6)
    burst = max(round(bits_per_s / 8 * _BURST_S), _LEAST_BURST)
    run_tool(
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
