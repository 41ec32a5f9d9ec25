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
        place = [*_variables(), torch.cuda.get_device_name(device), str(torch.version.cuda)]
    else:
        place = processor_arithmetic()
    return [torch.__version__, torch.get_num_threads(), *_precisions(), *place]


def processor_arithmetic() -> list[str]:
    """Return what decides about the bits of a product on this processor, by one thread."""
    capability = torch.backends.cpu.get_cpu_capability()
    return [*_variables(), _processor(), capability, platform.machine()]


def _variables() -> list[str]:
    return [f"{name}={os.environ.get(name, '')}" for name in _VARIABLES]


def _precisions() -> list[str]:
    """Return in which type products of float32 are made.

    Since torch 2.9 each backend has its own, and the getter of all raises once one was set.
    """
    backends = (torch.backends, torch.backends.cuda.matmul, _matmul_of_mkldnn())
    own = [getattr(each, "fp32_precision", None) for each in backends]
    return [torch.get_float32_matmul_precision()] if None in own else [str(each) for each in own]


def _matmul_of_mkldnn() -> object:
    return getattr(torch.backends.mkldnn, "matmul", None)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line for line in lines if line.startswith("model name")).strip()
    except (OSError, StopIteration):
        return platform.processor()
