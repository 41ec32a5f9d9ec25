"""Gradients that count more or less."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hvd_autosync.runtime.weighting import weight_backward


@pytest.fixture(autouse=True)
def weighted() -> Iterator[None]:
    weight_backward(lambda: 2.5)
    yield
    weight_backward(lambda: 1.0)


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
    of_ones, of_given = 1 + 2 + 1 + 4, 2 + 2 + 2 + 2
    assert x.grad is not None
    assert torch.equal(x.grad, 2.5 * (of_ones + of_given * given))


def test_equal_batches_are_passed_on_as_they_are() -> None:
    weight_backward(lambda: 1.0)
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar"):
        (2 * x).backward()
