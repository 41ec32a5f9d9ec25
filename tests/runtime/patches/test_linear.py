"""The bytes of factors, and which layers have none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from hvd_autosync.runtime.patches.factor_meter import FactorMeter
from hvd_autosync.runtime.patches.linear import matches

ROWS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


def measured(
    model: Net, loss: Callable[[Net], torch.Tensor] = lambda m: m(torch.randn(ROWS, 8)).sum()
) -> dict[str, int]:
    meter = FactorMeter(model.parameters())
    for _ in range(2):
        loss(model).backward()  # gradients add up; each pass is looked at alone
    names = {parameter: name for name, parameter in model.named_parameters()}
    meter.step_ends()
    loss(model).backward()  # belongs to the next step
    meter.step_ends()
    return {names[weight]: count for weight, count in meter.factor_bytes.items()}


def test_bytes_of_factors() -> None:
    expected = {"first.weight": 2 * 4 * ROWS * (8 + 16), "second.weight": 2 * 4 * ROWS * (16 + 4)}
    assert measured(Net()) == expected


def test_under_autocast_factors_have_half_the_bytes() -> None:
    def loss(model: Net) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.randn(ROWS, 8)).float().sum()

    expected = {"first.weight": 2 * 2 * ROWS * (8 + 16), "second.weight": 2 * 2 * ROWS * (16 + 4)}
    assert measured(Net(), loss) == expected


def test_a_layer_that_is_used_twice_counts_twice() -> None:
    x = torch.randn(ROWS, 8)
    found = measured(Net(), lambda m: m(x).sum() + F.linear(x, m.first.weight).sum())
    assert found["first.weight"] == 2 * 2 * 4 * ROWS * (8 + 16)


def test_gradients_that_are_no_products() -> None:
    x = torch.randn(ROWS, 8)
    penalized = measured(Net(), lambda m: m(x).sum() + m.first.weight.pow(2).sum())
    assert set(penalized) == {"second.weight"}
    hooked = Net()
    hooked.second.weight.register_hook(lambda gradient: gradient * 0.5)
    assert set(measured(hooked)) == {"first.weight"}
    unused = measured(Net(), lambda m: m.second(torch.randn(ROWS, 16)).sum())
    assert set(unused) == {"second.weight"}


def test_a_changed_element_is_no_match_and_a_neighbour_of_a_low_type_is_one() -> None:
    for kind in (torch.float32, torch.bfloat16):
        product = torch.randn(20, 30).to(kind).float()
        assert matches(product, product.clone(), kind)
        for row, change in ((3, 0.0), (4, 1.1)):
            changed = product.clone()
            changed[row, 7] *= change
            assert not matches(product, changed, kind)
    product = torch.full((2, 2), 1.5)
    neighbour = product * (1 + torch.finfo(torch.bfloat16).eps)
    assert matches(product, neighbour, torch.bfloat16)
    assert not matches(product, neighbour, torch.float32)


def test_a_gradient_that_is_not_finite_is_no_match() -> None:
    product = torch.ones(2, 2)
    for bad in (torch.inf, torch.nan):
        gradient = product.clone()
        gradient[0, 0] = bad
        assert not matches(product, gradient, torch.float32)
