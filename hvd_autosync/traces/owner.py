"""Who runs a study: told apart from later processes that happen to have the same number.

A driver killed with ``kill -9`` cannot say goodbye. Its study may be taken over only when it is
surely gone: on the same machine that can be looked up, elsewhere its heartbeats must have stopped.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

#: Seconds without a heartbeat after which a driver on another machine counts as dead.
HEARTBEAT_LIMIT_S = 120.0


@dataclass(frozen=True)
class Owner:
    """One process on one machine.

    Attributes:
        host: Host name.
        machine: Which boot of which machine, and which process namespace of it: host names alone
            repeat (``localhost``, containers).
        pid: Process number.
        started: When it started, in whatever unit the system counts; only compared.
    """

    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _machine(), pid, _process_start(pid) or "")

    @classmethod
    def nobody(cls) -> Owner:
        """Who owns what was let go."""
        return cls("", "", 0, "")

    def alive(self, heartbeat_age_s: float) -> bool:
        """Whether this owner still runs, as far as can be told from here.

        Args:
            heartbeat_age_s: Seconds since its last heartbeat; decides on other machines, where
                the clocks are taken to agree within a small part of the limit.
        """
        if (self.host, self.machine) == (socket.gethostname(), _machine()):
            return _process_start(self.pid) == self.started
        return heartbeat_age_s <= HEARTBEAT_LIMIT_S


def _machine() -> str:
    """This boot and process namespace; empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_start(pid: int) -> str | None:
    """Start of process ``pid``, or ``None`` when it has ended (a zombie has)."""
    if Path("/proc/self/stat").exists():
        # Not psutil's: that one is in seconds of a clock that may be set while the driver runs.
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        # The name in parentheses may contain anything; see proc(5), fields 3 and 22.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    try:
        return f"{psutil.Process(pid).create_time():.2f}"
    except psutil.Error:
        return None
