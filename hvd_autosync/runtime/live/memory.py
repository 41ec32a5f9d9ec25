"""Memory that is left for a strategy's buckets on this rank."""

from __future__ import annotations

import torch

from hvd_autosync.runtime.collectives.operations import local_size
from hvd_autosync.util.host_memory import host_free_bytes


def free_bytes(device: torch.device) -> int:
    """Free memory of a device, bytes; on a host, this rank's share of it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_free_bytes() // local_size()
