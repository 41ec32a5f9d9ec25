"""Rows of a gradient that a batch has touched."""

from __future__ import annotations

import pytest
import torch

from hvd_autosync.runtime.measure.touched import touched_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_that_are_not_all_zero(dtype: torch.dtype) -> None:
    gradient = torch.zeros(5, 3, dtype=dtype)
    gradient[1, 2], gradient[4, 0] = 1e-3, -1e-3
    assert touched_rows(gradient).tolist() == [1, 4]


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 0)])
def test_no_elements_are_no_touched_rows(shape: tuple[int, int]) -> None:
    """As of a linear layer without inputs, for features that a table does not have."""
    assert touched_rows(torch.zeros(shape)).tolist() == []
