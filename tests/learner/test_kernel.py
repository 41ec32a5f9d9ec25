from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import MaternKernel

from hvd_autosync.learner.kernel import MixedKernel


def inputs(numeric: int, categorical: int, count: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(count, numeric, generator=generator, dtype=torch.float64)
    codes = torch.randint(0, 3, (count, categorical), generator=generator).double()
    return torch.cat([numbers, codes], dim=-1)


@pytest.mark.parametrize(("numeric", "categorical"), [(3, 2), (3, 0), (0, 2), (0, 0)])
def test_it_is_a_covariance(numeric: int, categorical: int) -> None:
    x = inputs(numeric, categorical)
    kernel = MixedKernel(numeric, categorical)
    covariance = kernel(x).to_dense()
    assert torch.allclose(covariance, covariance.T)
    assert torch.linalg.eigvalsh(covariance).min() > -1e-9
    assert torch.allclose(kernel(x, diag=True), covariance.diagonal())
    assert torch.allclose(covariance.diagonal(), torch.ones(len(x), dtype=torch.float64))


def test_numbers_have_a_matern_kernel() -> None:
    x = inputs(2, 0)
    kernel = MixedKernel(2, 0)
    reference = MaternKernel(nu=2.5, ard_num_dims=2).double()
    reference.lengthscale = kernel.log_lengthscale.exp().detach()
    # Without categories their kernel is 1, and each of the three parts weighs a third.
    expected = (2 * reference(x).to_dense() + 1) / 3
    assert torch.allclose(kernel(x).to_dense(), expected)


def test_batches_are_batches() -> None:
    x = inputs(2, 2)
    kernel = MixedKernel(2, 2)
    batched = kernel(x.reshape(4, 3, 4), x).to_dense()
    assert torch.allclose(batched.reshape(12, 12), kernel(x).to_dense())


def test_categories_have_no_order() -> None:
    kernel = MixedKernel(0, 1)
    codes = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
    covariance = kernel(codes).to_dense()
    assert covariance[0, 1] == covariance[0, 2] == covariance[1, 2] < covariance[0, 0]


def test_nearness_of_numbers_counts() -> None:
    kernel = MixedKernel(1, 0)
    near, far = kernel(
        torch.tensor([[0.0]], dtype=torch.float64),
        torch.tensor([[0.1], [0.9]], dtype=torch.float64),
    ).to_dense()[0]
    assert far < near < 1


def test_every_parameter_has_a_gradient_and_a_prior() -> None:
    x = inputs(3, 2)
    kernel = MixedKernel(3, 2)
    kernel(x).to_dense().sum().backward()
    assert all(p.grad is not None and p.grad.abs().min() > 0 for p in kernel.parameters())
    assert len(list(kernel.named_priors())) == len(list(kernel.parameters()))
