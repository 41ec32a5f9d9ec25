"""What this process holds now, counted by the kernel, by malloc() and by Python."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path
from typing import Any


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class Held:
    """Counts, always in the same way; what there is when it is made is looked at no more."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # a million objects of imports, which would take longer than the steps
        self._mallinfo = ctypes.CDLL(None).mallinfo2
        self._mallinfo.restype = _Mallinfo

    def now(self) -> tuple[int, int, int, int, int, int]:
        """Resident bytes, malloc()'s bytes, Python's blocks, threads, descriptors, queued."""
        gc.collect()
        blocks = sys.getallocatedblocks()
        given = self._mallinfo()
        return (
            _resident_bytes(),
            given.uordblks + given.hblkhd,
            blocks,
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")) - 1,
            _queued(),
        )


def _resident_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("smaps_rollup has Rss")


def _queued() -> int:
    """Number of Horovod operations not waited for, and of our messages in flight."""
    handles = sys.modules["horovod.torch.mpi_ops"]._handle_map
    endpoint_module = sys.modules.get("hvd_autosync.runtime.collectives.endpoint")
    endpoints: list[Any] = [] if endpoint_module is None else list(endpoint_module._endpoints)
    messages = 0
    for each in endpoints:
        transport = each._transport
        messages += len(each._outbox) + len(getattr(transport, "_sending", ()))
        messages += sum(len(queue) for queue in getattr(transport, "_receiving", ()))
    return len(handles) + messages
