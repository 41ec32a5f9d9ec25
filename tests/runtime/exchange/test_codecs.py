"""Codecs of single tensors."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
import torch

from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.exchange.codecs import Int8Codec


@pytest.mark.parametrize(
    ("dtype", "size", "tolerance"),
    [
        (torch.float32, 1.0, 5e-3),
        (torch.float32, 1e-6, 5e-3),
        (torch.float16, 1.0, 5e-3),
        # A 127th of the largest number rounds to zero, and numbers to multiples of 6e-8.
        (torch.float16, 1e-6, 3e-2),
    ],
)
def test_int8_is_unbiased(dtype: torch.dtype, size: float, tolerance: float) -> None:

    def body() -> float:
        codec = Int8Codec(512, torch.zeros(0, dtype=dtype), 2)
        rows = (size * torch.randn(2, 256, generator=torch.Generator().manual_seed(1))).to(dtype)
        decoded = [codec.decode(codec.encode(rows)).double() for _ in range(1000)]
        error = sum(decoded[1:], decoded[0]) / len(decoded) - rows.double()
        return float(error.abs().mean() / rows.double().abs().mean())

    assert max(ThreadRanks(2).run(body)) < tolerance
