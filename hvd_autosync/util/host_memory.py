"""Memory of this host that a process may still use, with the limits of containers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

#: Files of a control group: its limit, what it uses, and the entry of ``memory.stat`` for files in
#: memory that can be dropped; in a group of version 2, and of version 1.
_SECOND = ("memory.max", "memory.current", "inactive_file")
_FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def host_free_bytes(root: Path = Path("/")) -> int:
    """Memory of this host that processes of this control group may still use, bytes.

    Args:
        root: The root of the file system.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration), open(root / "proc/meminfo") as lines:
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        free = int(line.split()[1]) << 10
    return min(free, *_left_by_limits(root), free)


def _left_by_limits(root: Path) -> Iterator[int]:
    """Yield what each limit of a batch system or container leaves, bytes."""
    groups = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines():
            _, controllers, path = line.split(":", 2)
            place, files = groups, _SECOND
            if controllers:
                place, files = groups / "memory", _FIRST
            if controllers and "memory" not in controllers.split(","):
                continue
            # In a container the group may be seen elsewhere than this line says: at the top.
            group = place / path.lstrip("/")
            for each in (group, *group.parents):
                yield from _left(each, *files)
                if each == place:
                    break


def _left(group: Path, limit: str, used: str, droppable: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
        most, now = (int((group / name).read_text()) for name in (limit, used))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield max(most - now + int(stat.get(droppable, 0)), 0)
