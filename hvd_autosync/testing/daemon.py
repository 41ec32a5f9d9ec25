"""A test bed that outlives the command that made it: one process keeps it, others go in.

The keeper holds the hosts (:class:`~.testbed.Testbed`) until it is told to end or is killed; the
kernel then ends everything inside. What others need to go in stands in one small file, which says
itself whether its keeper still lives.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class TestbedDaemon:
    """A test bed that runs.

    Attributes:
        daemon_pid: Process id of its keeper.
        started: When the keeper was started, in clock ticks since boot; tells it from a later
            process with the same id.
        hosts: Names of the hosts.
        pids: For each host a process inside.
        options: With which ``horovodrun`` uses all hosts.
    """

    daemon_pid: int
    started: int
    hosts: tuple[str, ...]
    pids: tuple[int, ...]
    options: tuple[str, ...]

    @property
    def lives(self) -> bool:
        """Whether the keeper is still there."""
        return _started(self.daemon_pid) == self.started

    def command(self, words: Sequence[str], host: int = 0) -> list[str]:
        """The command that runs ``words`` on a host; ``horovodrun`` is given all hosts.

        Raises:
            TestbedError: There is no such host.
        """
        if not 0 <= host < len(self.hosts):
            raise TestbedError(
                f"there is no host {host}", hint=f"Choose from 0 to {len(self.hosts) - 1}."
            )
        program, *rest = words
        if os.path.basename(program) == "horovodrun" and "-H" not in rest:
            rest = [*self.options, *rest]
        return enter_command(self.pids[host], [program, *rest])


def find() -> TestbedDaemon | None:
    """The test bed that is up, if one is."""
    try:
        fields = json.loads(_STATE.read_text())
        kept = TestbedDaemon(
            fields["daemon_pid"],
            fields["started"],
            *(tuple(fields[name]) for name in ("hosts", "pids", "options")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kept if kept.lives else None


def up(hosts: int, slots: int, rates_mbit: Sequence[float | None]) -> TestbedDaemon:
    """Start a keeper, and wait until its hosts are there.

    Raises:
        TestbedError: One is up already, or it cannot be made here.
    """
    if find() is not None:
        raise TestbedError("a test bed is up", hint="End it first: hvd-autosync testbed down.")
    plan = json.dumps({"hosts": hosts, "slots": slots, "rates_mbit": list(rates_mbit)})
    process = subprocess.Popen(
        run_main("hvd_autosync.testing.daemon", plan),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    deadline = time.monotonic() + _UP_S
    while process.poll() is None and time.monotonic() < deadline:
        kept = find()
        if kept is not None and kept.daemon_pid == process.pid:
            return kept
        time.sleep(0.05)
    process.kill()
    _, said = process.communicate()
    reason = said.strip().rpartition("\n")[2] or f"no hosts within {_UP_S:.0f} s"
    raise TestbedError(f"the test bed does not come up: {reason}", hint="Run as root on Linux.")


def down() -> bool:
    """End the test bed with everything that runs in it; whether there was one."""
    kept = find()
    if kept is not None and os.geteuid() != 0:
        raise TestbedError("the test bed belongs to root", hint="Take it down as root.")
    _STATE.unlink(missing_ok=True)
    if kept is None:
        return False
    os.kill(kept.daemon_pid, signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_S
    while kept.lives and time.monotonic() < deadline:
        time.sleep(0.02)
    if kept.lives:
        os.kill(kept.daemon_pid, signal.SIGKILL)
    return True


def keep(hosts: int, slots: int, rates_mbit: list[float | None]) -> None:
    """Be the keeper."""
    with Testbed(hosts, rates_mbit) as bed:
        kept = TestbedDaemon(
            os.getpid(),
            _started(os.getpid()),
            bed.hosts,
            bed.pids,
            tuple(bed.horovodrun_options(slots)),
        )
        passing = _STATE.with_suffix(f".{os.getpid()}")
        passing.write_text(json.dumps(asdict(kept)))
        passing.replace(_STATE)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


def _started(pid: int) -> int:
    """Start of a process in clock ticks since boot; 0 when it is gone (``proc(5)``, stat 22)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def main() -> None:
    """Be the keeper of the test bed that the argument describes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        keep(**json.loads(sys.argv[1]))
    except TestbedError as error:
        sys.exit(str(error.message))
