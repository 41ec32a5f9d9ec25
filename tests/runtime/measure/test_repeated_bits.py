from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_autosync.runtime.exchange.lossless import HEADER_BYTES, encode
from hvd_autosync.runtime.measure.repeated_bits import (
    AS_IS,
    bits_of,
    coded_bytes,
    coded_share,
    find_form,
)


def gradient(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1)) * 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zeros", [0.0, 0.1, 0.5, 0.9])
def test_the_share_is_that_of_the_code(dtype: torch.dtype, zeros: float) -> None:
    tensor = gradient(1_000_000).to(dtype).float()
    tensor[torch.rand(1_000_000, generator=torch.Generator().manual_seed(2)) < zeros] = 0.0
    _, share = find_form(bits_of(tensor))
    assert (len(encode(tensor)) - HEADER_BYTES) / 4e6 == pytest.approx(share, abs=0.02)


def test_a_sum_has_its_summands_exponents_and_all_bits() -> None:
    halves = gradient(100_000).to(torch.bfloat16).float()
    share, summed = coded_share(halves.view(100, 1000))
    assert 0.3 < share < 0.37 and 0.8 < summed < 0.87
    assert coded_share(gradient(100_000).to(torch.bfloat16)) == (share, summed)


def test_types_that_travel_as_they_are() -> None:
    for dtype in (torch.float64, torch.float16):
        assert coded_share(torch.zeros(100, dtype=dtype)) == (1.0, 1.0)


def test_codes_of_a_tensors_memory() -> None:
    """Whatever its type is: zeros of 16 bits are left out in pairs."""
    numbers = torch.relu(gradient(100_001))
    assert coded_bytes(torch.zeros(1000)) < 100
    assert 0.4 < coded_bytes(numbers) / 400_004 < 0.5
    halves = numbers.to(torch.bfloat16)
    assert 0.6 < coded_bytes(halves) / 200_002 < 0.7
    assert coded_bytes(numbers[1:]) == pytest.approx(coded_bytes(numbers), rel=0.01)
    assert coded_bytes(torch.empty(0)) == 0


def test_random_bits_are_left_as_they_are() -> None:
    random = np.random.default_rng(1).integers(0, 2**32, 100_000, np.uint32)
    assert find_form(random) == (AS_IS, 1.0)
    assert find_form(random[:0]) == (AS_IS, 1.0)


def test_numbers_that_are_not_finite_raise_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    find_form(np.array([0x7F800000, 0x7FC00001, 0x7F800001, 0x7F7FFFFF] * 100, np.uint32))
    assert not recwarn.list
