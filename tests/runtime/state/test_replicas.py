"""What a rank takes over from another one, beside parameters and states."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
import torch
from torch.optim.lr_scheduler import StepLR

from hvd_autosync.runtime.state.replicas import Replicas


@pytest.mark.parametrize("frozen", [False, True])
def test_schedulers_take_over_their_counts(frozen: bool) -> None:
    """Also those that the script has frozen by ``gc.freeze()``."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = StepLR(optimizer, 10)
    if frozen:
        gc.freeze()
    Replicas("test", optimizer).take_rates({"rates": [0.5], "schedulers": [{"last_epoch": 7}]})
    assert optimizer.param_groups[0]["lr"] == 0.5 and scheduler.last_epoch == 7
