"""The surrogate: a Gaussian process of the logarithm of the step time over one space.

``n``: number of observations or strategies; ``d``: dimension of the space. The GP sees *speed*,
minus the standardized logarithm of the step time, because BoTorch maximizes. Its prior mean
is a sum of prior functions (:mod:`hvd_autosync.learner.prior_functions`): the cost model, and
related tasks, each of which has a surrogate of its own. A GP over the knobs models
the residual. The result is a multi-task GP: the target is a weighted sum of the sources' functions,
taken at their posterior means, plus a function of its own. The noise has two parts: that of each
trial's mean, from the spread of its steps (heteroscedastic, known), and that between launches of
one strategy (homoscedastic, learned).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import torch
from botorch.exceptions.errors import BotorchError
from botorch.models import SingleTaskGP
from botorch.optim.fit import fit_gpytorch_mll_scipy
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior
from gpytorch.settings import cholesky_jitter
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from hvd_autosync.errors import AutosyncError
from hvd_autosync.learner.features import Features
from hvd_autosync.learner.kernel import MixedKernel, PriorMean
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.outcome_transform import OutcomeTransform
from hvd_autosync.learner.points import FloatArray, encode_all
from hvd_autosync.learner.prior_functions import (
    PriorFunction,
    cost_model_prior,
    design_matrix,
    discount_implausible,
    drop_constant,
    normalize_weights,
    prior_means,
    prior_stds,
    source_task_prior,
)
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.learner.source_selection import FEWEST_TO_JUDGE, sources_to_drop
from hvd_autosync.learner.surrogate import Surrogate, model_inputs
from hvd_autosync.search_space import SearchSpace

#: Most iterations of the fit; further ones change the likelihood little and cost most of the time.
_FIT_ITERATIONS = 75
#: Relative difference between launches of one strategy: its most likely value, and the standard
#: deviation of the logarithm of its variance (two of them cover 0.4 % to 9 %, in logarithms around
#: the most likely value). On shared machines 5 % and more were measured (benchmarks/README.md).
_RELAUNCH_NOISE, _RELAUNCH_DEVIATION = 0.02, 1.5
#: Smallest noise variance in the model's unit; it keeps the Cholesky factorization stable.
_NOISE_FLOOR = 1e-6
_JITTERS = (1e-8, 1e-4)
#: Prior standard deviation of the log step time over strategies without prior functions (the
#: median over the spread points of benchmarks/traces, 0.13 to 0.83), and of the residual with them.
_SPREAD, _UNEXPLAINED_SPREAD = 0.5, 0.12


def fit(problem: Problem, observations: Sequence[Observation]) -> Surrogate:
    """Fit the model to all observations of one problem.

    The last fits are cached, because proposing, stopping and choosing candidates need the same
    one; a fitted surrogate never changes.

    The fit does not fail on unusual data. Failed trials are ignored
    (:mod:`hvd_autosync.learner.feasibility` learns from them). If the hyperparameters cannot be
    optimized, the mode of their prior is used. Without observations the result is the prior around
    one second.

    Raises:
        SpaceError: An observed strategy does not lie in the problem's space.
    """
    # The fit needs these fields only; the others differ between callers and would miss the cache.
    known = Problem(problem.space, problem.task, problem.sources)
    return _fit(known, tuple(seen for seen in observations if seen.measured))


@lru_cache(maxsize=16)
def _fit(problem: Problem, observations: tuple[Observation, ...]) -> Surrogate:
    space = problem.space
    seen = observations or (Observation(space.default, 1.0, 1.0),)
    features = Features.of(space)
    points = encode_all(space, [one.strategy for one in seen])
    cost = cost_model_prior(space, problem.task, observations)
    cost_priors = [] if cost is None else drop_constant(space, [cost])
    sources = _source_task_priors(problem, cost)
    surrogate = _fitted(features, (*cost_priors, *normalize_weights(sources)), points, seen)
    if sources and len(observations) >= FEWEST_TO_JUDGE:
        dropped = sources_to_drop(surrogate.model, surrogate.priors, len(cost_priors))
        if dropped:
            kept = normalize_weights([each for each in sources if each.name not in dropped])
            surrogate = _fitted(features, (*cost_priors, *kept), points, seen, dropped)
    return surrogate


def _fitted(
    features: Features,
    priors: tuple[PriorFunction, ...],
    points: FloatArray,
    seen: tuple[Observation, ...],
    dropped: Mapping[str, float] = MappingProxyType({}),
) -> Surrogate:
    spread = _SPREAD if not priors else _UNEXPLAINED_SPREAD
    basis = design_matrix(priors, points)
    targets = OutcomeTransform.of(seen, basis, prior_means(priors), prior_stds(priors), spread)
    with isolated():
        inputs = model_inputs(features, basis, points, targets.scale)
        model = _build(features, priors, inputs, targets)
        _optimize(model)
    return Surrogate(model, features, priors, targets, dropped)


def _source_task_priors(problem: Problem, cost: PriorFunction | None) -> list[PriorFunction]:
    """Return the prior functions of the related tasks; a task that cannot be fitted is skipped."""
    found: list[PriorFunction] = []
    for source in problem.sources:
        with contextlib.suppress(AutosyncError):
            surrogate = fit(Problem(source.space, source.task), source.observations)
            if cost is not None and surrogate.has_cost_model:
                found += _residuals_of_sources(problem.space, source)
            else:
                prior = source_task_prior(problem.space, source, surrogate.mean_at, cost)
                kept = drop_constant(problem.space, [prior])
                found += kept if cost is None else _discounted(problem.space, kept)
    return found


@lru_cache(maxsize=64)
def _residuals_of_sources(space: SearchSpace, source: Source) -> tuple[PriorFunction, ...]:
    """Return the prior function of a source's residual, without its cost model; none if constant.

    It does not depend on the target's trials, so it is cached.

    Raises:
        AutosyncError: The source cannot be fitted.
    """
    surrogate = fit(Problem(source.space, source.task), source.observations)
    prior = source_task_prior(space, source, surrogate.residual_mean_at)
    return tuple(_discounted(space, drop_constant(space, [prior])))


def _discounted(space: SearchSpace, priors: Sequence[PriorFunction]) -> list[PriorFunction]:
    """Residuals of the cost model, each with its weight discounted by its plausibility."""
    return [discount_implausible(space, prior, _UNEXPLAINED_SPREAD) for prior in priors]


def _build(
    features: Features, priors: Sequence[PriorFunction], inputs: Tensor, targets: OutcomeTransform
) -> SingleTaskGP:
    """Build the model, with its hyperparameters at the mode of their prior."""
    speed = torch.from_numpy(-(targets.log_step - targets.center) / targets.scale)
    known = torch.from_numpy(targets.variance / targets.scale**2)
    relaunch = max((_RELAUNCH_NOISE / targets.scale) ** 2, 2 * _NOISE_FLOOR)
    # exp(location - deviation^2) is the mode of a log-normal density.
    location = math.log(relaunch) + _RELAUNCH_DEVIATION**2
    likelihood = FixedNoiseGaussianLikelihood(
        noise=known.clamp_min(_NOISE_FLOOR),
        learn_additional_noise=True,
        noise_prior=LogNormalPrior(location, _RELAUNCH_DEVIATION),
        noise_constraint=GreaterThan(_NOISE_FLOOR, initial_value=relaunch),
    )
    mean, std = (torch.from_numpy(each(priors)) for each in (prior_means, prior_stds))
    model = SingleTaskGP(
        inputs,
        speed.unsqueeze(-1),
        likelihood=likelihood,
        covar_module=MixedKernel(len(features.numeric), features.categorical_count, std),
        mean_module=PriorMean(mean),
        outcome_transform=None,
    )
    return model.to(inputs)


def _optimize(model: SingleTaskGP) -> None:
    """Maximize the posterior density of the hyperparameters, in place.

    A failed attempt is repeated with more jitter; after that the mode of the prior stays.
    """
    start = {name: value.clone() for name, value in model.state_dict().items()}
    objective = ExactMarginalLogLikelihood(model.likelihood, model)
    for jitter in _JITTERS:
        objective.train()
        try:
            with cholesky_jitter(double_value=jitter):
                fit_gpytorch_mll_scipy(objective, options={"maxiter": _FIT_ITERATIONS})
            if all(bool(value.isfinite().all()) for value in model.parameters()):
                break
        except (RuntimeError, ValueError, NotPSDError, BotorchError):
            pass
        model.load_state_dict(start)
    objective.eval()
