"""Gradients that count more or less."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hvd_autosync.runtime.patches.gradient_weight import weight_backward
from hvd_autosync.util import patches


class Weight:
    """Says what gradients count."""

    def __init__(self) -> None:
        self.value = 2.5

    def now(self) -> float:
        return self.value


@pytest.fixture(autouse=True)
def weight() -> Iterator[Weight]:
    own = Weight()
    weight_backward(own.now)
    yield own
    assert patches.uninstall("gradient weights")


def test_every_way_to_call_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    given = torch.tensor([1.0, 2.0, 3.0])
    x.sum().backward()
    (2 * x).backward(given)
    (2 * x).backward(gradient=given, retain_graph=True)
    torch.autograd.backward((2 * x).sum())
    torch.autograd.backward([x.sum(), 2 * x], [None, given])
    torch.autograd.backward([x.sum()], grad_tensors=[torch.tensor(4.0)])
    torch.autograd.backward(2 * x, given)
    torch.autograd.backward((2 * x).sum(), [torch.tensor(1.0)])
    torch.autograd.backward([x.sum()], torch.tensor(1.0))
    of_ones, of_given = 1 + 2 + 1 + 4 + 2 + 1, 2 + 2 + 2 + 2
    assert x.grad is not None
    assert torch.equal(x.grad, 2.5 * (of_ones + of_given * given))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_within_another_counts_once(reentrant: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    checkpoint(lambda y: 3 * y, x * 1.0, use_reentrant=reentrant).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((3,), 7.5))


def test_equal_batches_are_passed_on_as_they_are(weight: Weight) -> None:
    weight.value = 1.0
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar"):
        (2 * x).backward()


def test_nothing_is_kept_for_it(weight: Weight) -> None:
    weight_backward(Weight().now)  # whose object is gone
    x = torch.ones(3, requires_grad=True)
    x.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3))
