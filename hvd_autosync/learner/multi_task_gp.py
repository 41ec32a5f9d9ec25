"""The multi-task Gaussian process: a task's log step time, given its trials and related tasks.

The model is that of ScaML-GP [Tighineanu2024]_ with weights that are integrated out::

    f(x) = c + sum_j u_j z_j(x) + sum_m w_m (f_m(x) - f_m(x0)) + g(x)

z_j are the basis functions of the cost model, f_m the function of related task m with posterior
mean mu_m and covariance S_m, given that task's own trials in its own space
(:mod:`hvd_autosync.learner.source_posterior`), and g ~ GP(0, k) is the target's own. With normal
weights, w_m of mean m_m and variance v_m and u_j likewise, the first two moments are::

    mean:        c + sum_j m_j z_j + sum_m m_m mu_m
    covariance:  sum_j v_j z_j z_j' + sum_m (v_m mu_m mu_m' + (m_m^2 + v_m) S_m) + k

For given weights (v_m = 0) conditioning on the sources' trials first and on the target's then is
conditioning the joint process of all tasks on everything, at the cost of the target alone. With
integrated weights w_m f_m is not Gaussian: the posterior is that of the Gaussian process with the
same mean and covariance.

``n``: number of points; ``d``: dimension of the space; ``p + c``: inputs of the knobs
(:mod:`hvd_autosync.learner.features`); ``e``: basis functions, of which each source's mu_m is one.

.. [Tighineanu2024] P. Tighineanu et al., "Scalable Meta-Learning with Gaussian Processes",
   AISTATS 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from botorch.models import SingleTaskGP
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.means import Mean
from gpytorch.priors import LogNormalPrior, NormalPrior
from linear_operator import LinearOperator
from linear_operator.operators import DiagLinearOperator
from torch import Tensor
from torch.nn import Parameter

from hvd_autosync.learner.features import Features
from hvd_autosync.learner.hyperprior import SHIPPED, Hyperprior
from hvd_autosync.learner.input_transform import StrategyInputs
from hvd_autosync.learner.kernel import MixedKernel
from hvd_autosync.learner.outcome_transform import StepTimes, StepTimeTransform
from hvd_autosync.learner.points import FloatArray
from hvd_autosync.learner.prior_functions import PriorFunction, prior_means

#: Smallest noise variance in the model's unit; it keeps the Cholesky factorization stable.
_NOISE_FLOOR = 1e-6


class TrialNoise(FixedNoiseGaussianLikelihood):  # type: ignore[misc]
    """The noise of trials: known from their steps, and between launches, which is learned.

    The noise that BoTorch passes with new trials (``condition_on_observations``, ``fantasize``) is
    their whole noise; GPyTorch would count it twice, as known and as learned.

    Args:
        known: Known noise variances, ``(n,)``, in the model's unit.
        scale: The model's unit, in logarithms of seconds.
        hyperprior: The prior of the noise between launches.
    """

    def __init__(self, known: Tensor, scale: float, hyperprior: Hyperprior) -> None:
        launches = max(hyperprior.launch_variance_mode() / scale**2, 2 * _NOISE_FLOOR)
        deviation = hyperprior.launch_noise_deviation
        # exp(location - deviation^2) is the mode of a log-normal density.
        location = math.log(launches) + deviation**2
        super().__init__(
            noise=known.clamp_min(_NOISE_FLOOR),
            learn_additional_noise=True,
            noise_prior=LogNormalPrior(location, deviation),
            noise_constraint=GreaterThan(_NOISE_FLOOR, initial_value=launches),
        )

    def get_fantasy_likelihood(self, **kwargs: Any) -> TrialNoise:
        """Return the likelihood with new trials of the whole ``noise``, ``... x m``.

        Raises:
            RuntimeError: There is no ``noise``.
        """
        if "noise" in kwargs:
            kwargs["noise"] = (kwargs["noise"] - self.second_noise).clamp_min(_NOISE_FLOOR)
        found: TrialNoise = super().get_fantasy_likelihood(**kwargs)
        return found

    def _shaped_noise_covar(
        self, base_shape: torch.Size, *params: Any, **kwargs: Any
    ) -> Tensor | LinearOperator:
        if kwargs.get("noise") is not None:
            return DiagLinearOperator(kwargs["noise"])
        return super()._shaped_noise_covar(base_shape, *params, **kwargs)


class MultiTaskMean(Mean):  # type: ignore[misc]
    """A constant plus the basis functions at the prior means of their weights.

    Args:
        knob_count: Number of inputs of the knobs, ``p + c``.
        priors: The prior functions.
        scale: The model's unit, in logarithms of seconds.
    """

    def __init__(self, knob_count: int, priors: Sequence[PriorFunction], scale: float) -> None:
        super().__init__()
        weights = torch.from_numpy(prior_means(priors)) / scale
        self._basis = slice(knob_count, knob_count + len(weights))
        self._counts = [len(each.prior_mean) for each in priors]
        self.register_buffer("_weights", weights)
        self.register_parameter("constant", Parameter(torch.zeros((), dtype=torch.float64)))
        self.register_prior("constant_prior", NormalPrior(0.0, 1.0), "constant")

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean at ``x``, ``batch_shape x n x inputs``: ``batch_shape x n``."""
        mean: Tensor = self.constant + x[..., self._basis] @ self._weights
        return mean

    def of_prior(self, index: int, x: Tensor) -> Tensor:
        """Return what prior function ``index`` adds to the mean, ``batch_shape x n``."""
        weights = self._weights.split(self._counts)[index]
        basis = x[..., self._basis].split(self._counts, dim=-1)[index]
        mean: Tensor = basis @ weights
        return mean


class MultiTaskKernel(Kernel):  # type: ignore[misc]
    """The covariance of the module: of the weights, of the sources and of the target's own.

    Args:
        own: The kernel k of the knobs.
        knob_count: Number of inputs of the knobs, ``p + c``.
        priors: The prior functions.
        scale: The model's unit, in logarithms of seconds.
    """

    def __init__(
        self, own: MixedKernel, knob_count: int, priors: Sequence[PriorFunction], scale: float
    ) -> None:
        super().__init__()
        self.own = own
        self.knob_count, self._scale = knob_count, scale
        self._parts = list(_parts(priors, knob_count))
        self._training: tuple[Tensor, Tensor] | None = None

    def remember(self, inputs: Tensor) -> None:
        """Keep what does not change during a fit to trials of these inputs, ``n x inputs``."""
        if self._parts:
            self._training = inputs, self._known(inputs, inputs)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: Any) -> Tensor:
        """Return the covariance of ``x1`` and ``x2`` in the model's unit.

        Args:
            x1: ``batch_shape x n x inputs``.
            x2: ``batch_shape x m x inputs``.
            diag: Compute only the covariances of rows with equal index (n = m).

        Returns:
            ``batch_shape x n x m``, or ``batch_shape x n`` when ``diag``.
        """
        if diag:
            x1, x2 = x1.unsqueeze(-2), x2.unsqueeze(-2)
        knobs = self.knob_count
        covariance: Tensor = self.own.forward(x1[..., :knobs], x2[..., :knobs])
        if self._parts:
            covariance = covariance + self._known(x1, x2)
        return covariance.squeeze(-1).squeeze(-1) if diag else covariance

    def of_prior(self, index: int, x1: Tensor, x2: Tensor) -> Tensor:
        """Return what prior function ``index`` adds to the covariance, ``... x n x m``."""
        covariance: Tensor = self._parts[index](x1, x2) / self._scale**2
        return covariance

    def _known(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Return the covariance of the prior functions; it has no hyperparameters."""
        if self._training is not None:
            inputs, known = self._training
            if torch.equal(x1, inputs) and torch.equal(x2, inputs):
                return known
        of_each = [part(x1, x2) for part in self._parts]
        return torch.stack(of_each).sum(dim=0) / self._scale**2


class _Part:
    """The covariance of one prior function, in squared logarithms of seconds.

    Args:
        prior: The prior function.
        basis: Where its basis functions are among the inputs.
        columns: Where the columns of its source are.
    """

    def __init__(self, prior: PriorFunction, basis: slice, columns: slice) -> None:
        self._variance = torch.tensor(prior.prior_std, dtype=torch.float64).square()
        self._basis, self._columns, self._source = basis, columns, prior.source
        mean, deviation = prior.prior_mean[0], prior.prior_std[0]
        self._squared_weight = mean**2 + deviation**2  # of a source: the second moment

    def __call__(self, x1: Tensor, x2: Tensor) -> Tensor:
        scaled = self._variance * x1[..., self._basis]
        covariance: Tensor = scaled @ x2[..., self._basis].transpose(-1, -2)
        if self._source is None:
            return covariance
        columns = x1[..., self._columns], x2[..., self._columns]
        return covariance + self._squared_weight * self._source.covariance(*columns)


def _parts(priors: Sequence[PriorFunction], knob_count: int) -> Sequence[_Part]:
    basis, columns = knob_count, knob_count + sum(len(each.prior_mean) for each in priors)
    parts = []
    for prior in priors:
        width = 0 if prior.source is None else prior.source.width
        after = basis + len(prior.prior_mean)
        parts.append(_Part(prior, slice(basis, after), slice(columns, columns + width)))
        basis, columns = after, columns + width
    return parts


class MultiTaskGP(SingleTaskGP):
    """The model of this module over points of one space, ``n x d``; it predicts log step times.

    An ordinary BoTorch model: ``posterior``, ``condition_on_observations`` and ``fantasize`` take
    points and give logarithms of seconds; the smallest is the best. A point is that of a strategy
    (``space.encode``). Its noise has two parts: that of each trial's mean, from the spread of its
    steps (heteroscedastic, known), and that between launches of one strategy (learned).
    Hyperparameters start at the mode of their prior.

    Args:
        features: The features of the space.
        priors: The prior functions: cost model and related tasks.
        points: Discretized points of the trials, ``n x d``.
        times: Their step times, and how they are standardized.
        hyperprior: What is believed of every task.
    """

    input_transform: StrategyInputs
    outcome_transform: StepTimeTransform
    mean_module: MultiTaskMean
    covar_module: MultiTaskKernel

    def __init__(
        self,
        features: Features,
        priors: Sequence[PriorFunction],
        points: FloatArray,
        times: StepTimes,
        hyperprior: Hyperprior = SHIPPED,
    ) -> None:
        known = torch.from_numpy(times.variance / times.scale**2)
        numeric, categorical = len(features.numeric), features.categorical_count
        own, knobs = MixedKernel(numeric, categorical), numeric + categorical
        super().__init__(
            torch.from_numpy(points),
            torch.from_numpy(times.log_step).unsqueeze(-1),
            likelihood=TrialNoise(known, times.scale, hyperprior),
            covar_module=MultiTaskKernel(own, knobs, priors, times.scale),
            mean_module=MultiTaskMean(knobs, priors, times.scale),
            input_transform=StrategyInputs(features, priors),
            outcome_transform=StepTimeTransform(times.center, times.scale),
        )
        self.to(dtype=torch.float64)
        self.covar_module.remember(self.transform_inputs(self.train_inputs[0]))

    @property
    def factorization(self) -> tuple[Tensor, Tensor]:
        """Cholesky factor of the covariance of the noisy trials, and their weights in the mean.

        These are GPyTorch's own caches for :meth:`posterior`, so nothing is factorized twice.

        Returns:
            ``n x n`` and ``(n,)``, in the model's unit.
        """
        self.eval()
        if self.prediction_strategy is None:
            self(self.train_inputs[0][:1])  # GPyTorch makes it at the first prediction
        strategy: Any = self.prediction_strategy
        return strategy.lik_train_train_covar.cholesky().to_dense(), strategy.mean_cache
