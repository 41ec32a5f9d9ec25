"""Changes of gradients that a script makes where torch does not count them."""

from __future__ import annotations

import pytest
import torch

from hvd_autosync.runtime.exchange.changed_gradients import ChangedGradients, sum_of_bits


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_element_counts(count: int, dtype: torch.dtype) -> None:
    """Whether or not there are whole integers of 64 bits."""
    for place in range(count):
        parameter = torch.nn.Parameter(torch.ones(count, dtype=dtype))
        gradient = torch.ones(count, dtype=dtype)
        changes = ChangedGradients(with_bits=True)
        changes.note(parameter, gradient)
        assert not changes.found()
        gradient.data[place] *= 2
        assert changes.found()


def test_no_sum_is_0() -> None:
    """It stands for a gradient whose bits are not compared."""
    assert all(sum_of_bits(torch.zeros(count)) for count in range(4))
