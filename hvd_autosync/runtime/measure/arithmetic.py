"""What decides about the bits of a product of matrices."""

from __future__ import annotations

import os
import platform

import torch

#: Variables by which libraries choose how they multiply.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
)


def arithmetic(device: torch.device) -> list[str | int]:
    """Return what decides about the bits of a product on this rank; equal where products are."""
    if device.type == "cuda":
        place = [torch.cuda.get_device_name(device), str(torch.version.cuda)]
    else:
        place = [_processor(), torch.backends.cpu.get_cpu_capability(), platform.machine()]
    chosen = [f"{name}={os.environ.get(name, '')}" for name in _VARIABLES]
    precision = torch.get_float32_matmul_precision()
    return [torch.__version__, torch.get_num_threads(), precision, *chosen, *place]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line for line in lines if line.startswith("model name")).strip()
    except (OSError, StopIteration):
        return platform.processor()
