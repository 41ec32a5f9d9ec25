"""Isolation of numerical work: global random state, threads and warnings are restored afterwards.

The matrices here are small. More than one thread makes the work slower (several times, if the
cores are shared with trials) and may change the last bits, so one thread is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from botorch.settings import validate_input_scaling
from gpytorch.settings import max_cholesky_size

#: GPyTorch uses iterative solvers with random probes above this number of observations.
_ALWAYS_CHOLESKY = 1_000_000


@contextmanager
def isolated(seed: int = 0) -> Iterator[None]:
    """Run the body on one thread, with torch's CPU generator at ``seed``; then restore both."""
    threads = torch.get_num_threads()
    with (
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        validate_input_scaling(False),
        max_cholesky_size(_ALWAYS_CHOLESKY),
    ):
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
