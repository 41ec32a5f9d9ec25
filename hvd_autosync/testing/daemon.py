"""A test bed that outlives the command that made it, held by a daemon.

The daemon holds the hosts (:class:`~.testbed.Testbed`) until it is ended or killed; the kernel then
ends everything inside. One small file has what other processes need to enter the hosts, and the
daemon's process id and start time, so that a file of an ended daemon is recognized.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hvd_autosync.testing.namespaces import TestbedError, enter_command
from hvd_autosync.testing.testbed import Testbed
from hvd_autosync.util.program import run_main

_STATE = Path("/run/hvd-autosync-testbed.json")
_UP_S, _DOWN_S = 60.0, 15.0
#: Signals that end a test bed.
_ENDING = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class TestbedDaemon:
    """A running test bed.

    Attributes:
        daemon: Process id of the daemon.
        started: Start time of the daemon, in clock ticks since boot, which distinguishes it from a
            later process with the same id.
        hosts: Names of the hosts.
        pids: A process id for each host, whose namespaces are the host's.
        options: Options with which ``horovodrun`` uses all hosts.
    """

    daemon: int
    started: int
    hosts: tuple[str, ...]
    pids: tuple[int, ...]
    options: tuple[str, ...]

    @property
    def alive(self) -> bool:
        """Whether the daemon still runs."""
        return _started(self.daemon) == self.started

    def command(self, words: Sequence[str], host: int = 0) -> list[str]:
        """Return the command that runs ``words`` on a host; ``horovodrun`` gets all hosts.

        Raises:
            TestbedError: There is no such host.
        """
        if not 0 <= host < len(self.hosts):
            raise TestbedError(
                f"there is no host {host}", hint=f"Choose from 0 to {len(self.hosts) - 1}."
            )
        program, *rest = words
        if Path(program).name == "horovodrun" and "-H" not in rest:
            rest = [*self.options, *rest]
        return enter_command(self.pids[host], [program, *rest])


def find() -> TestbedDaemon | None:
    """Return the running test bed, or ``None``."""
    try:
        fields = json.loads(_STATE.read_text())
        testbed = TestbedDaemon(
            fields["daemon"],
            fields["started"],
            *(tuple(fields[name]) for name in ("hosts", "pids", "options")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return testbed if testbed.alive else None


def up(hosts: int, slots: int, rates_mbit: Sequence[float | None]) -> TestbedDaemon:
    """Start a daemon, and wait until its hosts are ready.

    Raises:
        TestbedError: A test bed is running already, or cannot be made here.
    """
    if find() is not None:
        raise TestbedError(
            "a test bed is running already", hint="End it first: hvd-autosync testbed down."
        )
    plan = json.dumps({"hosts": hosts, "slots": slots, "rates_mbit": list(rates_mbit)})
    daemon = subprocess.Popen(
        run_main("hvd_autosync.testing.daemon", plan),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    deadline = time.monotonic() + _UP_S
    try:
        while daemon.poll() is None and time.monotonic() < deadline:
            testbed = find()
            if testbed is not None and testbed.daemon == daemon.pid:
                return testbed
            time.sleep(0.05)
    except BaseException:  # Ctrl-C, which does not reach the daemon
        daemon.kill()
        daemon.communicate()
        raise
    daemon.kill()
    _, errors = daemon.communicate()
    reason = errors.strip().rpartition("\n")[2] or f"no hosts within {_UP_S:.0f} s"
    raise TestbedError(f"the test bed did not start: {reason}", hint="Run as root on Linux.")


def down() -> bool:
    """End the test bed with everything that runs in it; return whether there was one."""
    testbed = find()
    if testbed is not None and os.geteuid() != 0:
        raise TestbedError("the test bed belongs to root", hint="Take it down as root.")
    with contextlib.suppress(PermissionError):  # left by a bed of root's that was killed
        _STATE.unlink(missing_ok=True)
    if testbed is None:
        return False
    os.kill(testbed.daemon, signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_S
    while testbed.alive and time.monotonic() < deadline:
        time.sleep(0.02)
    if testbed.alive:
        os.kill(testbed.daemon, signal.SIGKILL)
    return True


def run_daemon(hosts: int, slots: int, rates_mbit: list[float | None]) -> None:
    """Run a test bed until a signal ends it."""
    with Testbed(hosts, rates_mbit) as bed:
        # Not before: what runs on the hosts, such as an old sshd, would pass the mask on.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        testbed = TestbedDaemon(
            os.getpid(),
            _started(os.getpid()),
            bed.hosts,
            bed.pids,
            tuple(bed.horovodrun_options(slots)),
        )
        temporary = _STATE.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(asdict(testbed)))
        temporary.replace(_STATE)
        signal.sigwait(_ENDING)


def _started(pid: int) -> int:
    """Return a process's start in clock ticks since boot; 0 if it has ended (``proc(5)``)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def main() -> None:
    """Run the daemon of the test bed that the command's argument describes."""
    try:
        run_daemon(**json.loads(sys.argv[1]))
    except TestbedError as error:
        sys.exit(str(error.message))
