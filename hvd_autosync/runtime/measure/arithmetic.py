"""What decides about the bits of a product of matrices."""

from __future__ import annotations

import platform

import torch


def arithmetic(device: torch.device) -> list[str | int]:
    """What decides about the bits of a product on this rank; equal where products are."""
    if device.type == "cuda":
        place = [torch.cuda.get_device_name(device), str(torch.version.cuda)]
    else:
        place = [_processor(), torch.backends.cpu.get_cpu_capability(), platform.machine()]
    return [torch.__version__, torch.get_num_threads(), *place]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line for line in lines if line.startswith("model name")).strip()
    except (OSError, StopIteration):
        return platform.processor()
