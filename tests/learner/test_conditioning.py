"""Gaussian conditioning against plain numpy: inverses, and every value left out in turn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from linear_operator.utils.errors import NotPSDError
from scipy.stats import multivariate_normal, norm

from hvd_autosync.learner.conditioning import Conditioning
from hvd_autosync.learner.points import FloatArray

POINTS = 4


def matrices(n: int, *residuals: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Covariance of ``n`` values with noise, residual, cross covariances, prior covariance."""
    rng = np.random.default_rng([n, *residuals])
    root = rng.normal(size=(n + POINTS, n + POINTS))
    joint = root @ root.T / (n + POINTS) + 0.01 * np.eye(n + POINTS)
    noise = np.diag(rng.uniform(0.01, 0.3, n))
    return joint[:n, :n] + noise, rng.normal(size=(n, *residuals)), joint[n:, :n], joint[n:, n:]


def conditioned(covariance: FloatArray, residual: FloatArray) -> Conditioning:
    return Conditioning(torch.from_numpy(covariance), torch.from_numpy(residual))


@pytest.mark.parametrize("residuals", [(), (1,), (3,)])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 40])
def test_the_posterior_is_that_of_the_joint_normal(n: int, residuals: tuple[int, ...]) -> None:
    covariance, residual, cross, prior = matrices(n, *residuals)
    process = conditioned(covariance, residual)
    inverse = np.linalg.inv(covariance)
    across, own = torch.from_numpy(cross), torch.from_numpy(prior)
    posterior = prior - cross @ inverse @ cross.T
    assert process.weights.numpy() == pytest.approx(inverse @ residual, abs=1e-9)
    assert process.mean(across).numpy() == pytest.approx(cross @ inverse @ residual, abs=1e-9)
    assert process.covariance(own, across).numpy() == pytest.approx(posterior, abs=1e-9)
    variance = process.variance(own.diagonal(), across).numpy()
    assert variance == pytest.approx(posterior.diagonal(), abs=1e-9)


@pytest.mark.parametrize("residuals", [(), (1,), (3,)])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 40])
def test_each_value_given_the_others(n: int, residuals: tuple[int, ...]) -> None:
    covariance, residual, _, _ = matrices(n, *residuals)
    found = conditioned(covariance, residual).leave_one_out
    mean, variance, score = np.zeros_like(residual), np.zeros(n), np.zeros(residuals)
    for i in range(n):
        others = np.arange(n) != i
        gain = covariance[i, others] @ np.linalg.inv(covariance[np.ix_(others, others)])
        mean[i] = gain @ residual[others]
        variance[i] = covariance[i, i] - gain @ covariance[others, i]
        score += norm.logpdf(residual[i], mean[i], math.sqrt(variance[i]))
    assert found.mean.numpy() == pytest.approx(mean, abs=1e-9)
    assert found.variance.numpy() == pytest.approx(variance, abs=1e-9)
    assert found.score.numpy() == pytest.approx(score, abs=1e-9)


@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_the_marginal_density(n: int) -> None:
    covariance, residual, _, _ = matrices(n, 3)
    several = conditioned(covariance, residual).log_density.tolist()
    alone = [float(conditioned(covariance, column).log_density) for column in residual.T]
    expected = [multivariate_normal(np.zeros(n), covariance).logpdf(c) for c in residual.T]
    assert several == pytest.approx(expected) and alone == pytest.approx(expected)


def test_nothing_measured_has_density_one() -> None:
    assert conditioned(np.empty((0, 0)), np.empty(0)).log_density == 0.0
    assert conditioned(np.empty((0, 0)), np.empty((0, 2))).log_density.tolist() == [0.0, 0.0]


def test_round_off_gives_no_negative_variance() -> None:
    """Of a point measured without noise, whose prior variance another formula has rounded."""
    one = np.ones((1, 1))
    process, cross = conditioned(one, np.zeros(1)), torch.from_numpy(one)
    prior = torch.from_numpy(np.nextafter(one, 0.0))
    assert process.covariance(prior, cross) < 0.0
    assert process.variance(prior.diagonal(), cross) == 0.0


def test_what_is_no_covariance_is_refused() -> None:
    with pytest.warns(match="jitter"), pytest.raises(NotPSDError):
        conditioned(np.array([[1.0, 2.0], [2.0, 1.0]]), np.zeros(2))


def test_gradients() -> None:
    """Of all results, with respect to the root of the covariance and all other arguments."""

    def results(root: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        residual, cross, prior = others
        process = Conditioning(root @ root.mT + torch.eye(len(root)), residual)
        left = process.leave_one_out
        return (
            process.mean(cross),
            process.covariance(prior, cross),
            process.variance(prior.diagonal(), cross),
            process.log_density,
            left.mean,
            left.variance,
            left.score,
        )

    torch.manual_seed(0)
    root, residual = torch.randn(3, 3).double(), torch.randn(3, 2).double()
    cross, prior = 0.1 * torch.randn(2, 3).double(), torch.eye(2).double()
    arguments = [each.requires_grad_() for each in (root, residual, cross, prior)]
    assert torch.autograd.gradcheck(results, arguments)
