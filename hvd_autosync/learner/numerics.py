"""Isolation of numerical work from torch's global state, which is restored afterwards.

The matrices here are small. More than one thread makes the work slower (several times, if the
cores are shared with trials) and may change the last bits, so one thread is used. A script or a
notebook may have turned gradients off or set another default dtype or device; with these a fit
would fail, or give other bits than a replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from botorch.settings import validate_input_scaling
from gpytorch.settings import max_cholesky_size

#: GPyTorch uses iterative solvers with random probes above this number of observations.
_ALWAYS_CHOLESKY = 1_000_000


@contextmanager
def isolated(seed: int = 0) -> Iterator[None]:
    """Run the body in the same state of torch in every process; then restore the caller's.

    The body has one thread, torch's CPU generator at ``seed``, gradients, the CPU as the default
    device and float32 as the default dtype. Number of threads and dtype are those of the process,
    so other threads see them too.
    """
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    # A device context slows every function down, so there is none if the default is the CPU.
    on_cpu = torch.empty(0).device.type == "cpu"
    with (
        nullcontext() if on_cpu else torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        validate_input_scaling(False),
        max_cholesky_size(_ALWAYS_CHOLESKY),
    ):
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds other devices, too
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
