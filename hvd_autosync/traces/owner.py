"""The owner of a study: the driver process that runs it.

A driver that was killed cannot release its study. Another driver may take the study over only if
the owner is dead: on the same machine its process is looked up; on another machine its heartbeats
must have stopped. The start time tells the owner from later processes with the same number.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvd_autosync.search_space.records import Record

#: Interval of a driver's heartbeats, which keep others from taking over its study, seconds.
HEARTBEAT_S = 20.0
#: Seconds without a heartbeat after which a driver on another machine counts as dead.
HEARTBEAT_LIMIT_S = 120.0
#: Of the whole process: a network may rename the host meanwhile.
_HOST = socket.gethostname()


@dataclass(frozen=True)
class Owner(Record):
    """One process on one machine.

    Attributes:
        host: Host name.
        machine: Boot and process namespace of the machine, because host names are not unique
            (``localhost``, containers), and may change.
        pid: Process number.
        started: Start time, in the unit of the system; only compared.
    """

    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> Owner:
        """Return this process."""
        pid = os.getpid()
        return cls(_HOST, _machine(), pid, _process_start(pid) or "")

    @classmethod
    def nobody(cls) -> Owner:
        """Return the owner of a released study."""
        return cls("", "", 0, "")

    def alive(self, heartbeat_age_s: float) -> bool:
        """Return whether this owner still runs, as far as this machine can know.

        Args:
            heartbeat_age_s: Seconds since its last heartbeat. It decides for owners on other
                machines; the clocks are assumed to agree within a small part of the limit.
        """
        here = self.machine == _machine() if self.machine else self.host == _HOST
        if here:
            return _process_start(self.pid) == self.started
        return heartbeat_age_s <= HEARTBEAT_LIMIT_S


def _machine() -> str:
    """Return this boot and process namespace; empty if the system does not provide them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _process_start(pid: int) -> str | None:
    """Start time of process ``pid``; ``None`` if it has ended or is a zombie."""
    if Path("/proc/self/stat").exists():
        # psutil's start time depends on the clock, which may be set while the driver runs.
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return None
        # The name in parentheses may contain anything; see proc(5), fields 3 and 22.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    try:
        return f"{psutil.Process(pid).create_time():.2f}"
    except psutil.Error:
        return None
