"""NCCL's operations among the one rank that one GPU can have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_one_rank_trains_as_under_horovods_own_optimizer(launch: Callable[..., Any]) -> None:
    import horovod.torch as hvd

    if not torch.cuda.is_available() or not hvd.nccl_built():
        pytest.skip("needs a GPU and a Horovod with NCCL")
    job = launch("nccl_alone.py", under="alone", warmup_steps=0, measured_steps=10**6)
    assert "as under Horovod's own optimizer" in job.output, job.output
    assert job.status == 0
