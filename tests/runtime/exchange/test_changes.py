"""Changes of gradients that a script makes where torch does not count them."""

from __future__ import annotations

import pytest
import torch

from hvd_autosync.runtime.exchange import changed_gradients
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


def test_gradients_are_summed_again_only_after_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over memory for each operation would cost more than some exchanges save."""
    sums: list[torch.Tensor] = []

    def sum_of(tensor: torch.Tensor) -> torch.Tensor:
        sums.append(tensor)
        return own(tensor)

    own = changed_gradients._sum_of_bits
    monkeypatch.setattr(changed_gradients, "_sum_of_bits", sum_of)
    parameter, gradient = torch.nn.Parameter(torch.ones(8)), torch.ones(8)
    changes = ChangedGradients(with_bits=True)
    changes.note(parameter, gradient)
    for written in (False, True, False):
        if written:
            gradient.copy_(torch.full((8,), 3.0))
        changes.written([parameter])
    assert len(sums) == 2 and not changes.found()


def test_a_change_between_two_operations_is_the_scripts() -> None:
    parameter, gradient = torch.nn.Parameter(torch.ones(8)), torch.ones(8)
    changes = ChangedGradients(with_bits=True)
    changes.note(parameter, gradient)
    gradient.data.mul_(2)
    changes.written([parameter])
    assert changes.found()
