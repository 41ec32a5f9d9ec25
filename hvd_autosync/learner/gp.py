"""Fits of the surrogate: a multi-task Gaussian process of the log step time over one space.

The model is :class:`hvd_autosync.learner.multi_task_gp.MultiTaskGP`. Its prior functions
(:mod:`hvd_autosync.learner.prior_functions`) are the cost model, and related tasks, each of which
has a model of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

import torch
from botorch.exceptions.errors import BotorchError
from botorch.optim.fit import fit_gpytorch_mll_scipy
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.settings import cholesky_jitter
from linear_operator.utils.errors import NanError, NotPSDError
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from hvd_autosync.errors import AutosyncError
from hvd_autosync.learner.features import Features
from hvd_autosync.learner.hyperprior import SHIPPED, Hyperprior
from hvd_autosync.learner.multi_task_gp import MultiTaskGP
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.outcome_transform import StepTimes
from hvd_autosync.learner.points import FloatArray, encode_all
from hvd_autosync.learner.prior_functions import (
    PriorFunction,
    cost_model_of,
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
from hvd_autosync.learner.source_posterior import source_posterior
from hvd_autosync.learner.source_selection import FEWEST_TO_JUDGE, sources_to_drop
from hvd_autosync.learner.surrogate import Surrogate
from hvd_autosync.search_space import SearchSpace, Task

#: Most iterations of the fit; further ones change the likelihood little and cost most of the time.
_FIT_ITERATIONS = 75
_JITTERS = (1e-8, 1e-4)
#: What numbers alone may cause in a fit; priors raise ValueError where a hyperparameter is NaN.
_NUMERICAL = (BotorchError, NanError, NotPSDError, LinAlgError, ValueError)


def fit(
    problem: Problem, observations: Sequence[Observation], *, select_sources: bool = True
) -> Surrogate:
    """Fit the model to all observations of one problem.

    The last fits are cached, because proposing, stopping and choosing candidates need the same
    one; a fitted surrogate never changes.

    The fit does not fail on unusual data. Failed trials are ignored
    (:mod:`hvd_autosync.learner.feasibility` learns from them). If the hyperparameters cannot be
    optimized, the mode of their prior is used. Without observations the result is the prior around
    one second.

    Args:
        problem: The space, and what is known before the first trial.
        observations: The outcomes of all trials so far.
        select_sources: Whether related tasks that cause negative transfer are dropped.

    Raises:
        SpaceError: An observed strategy does not lie in the problem's space.
    """
    # The fit needs these fields only; the others differ between callers and would miss the cache.
    known = Problem(problem.space, problem.task, problem.sources, hyperprior=problem.hyperprior)
    measured = tuple(seen for seen in observations if seen.measured)
    return _fit(known, measured, select_sources=select_sources)


def source_hyperparameters(source: Source, hyperprior: Hyperprior = SHIPPED) -> tuple[float, ...]:
    """Return the hyperparameters of a source's model, fitted unless ``source`` has them.

    Raises:
        AutosyncError: The source cannot be fitted.
    """
    parameters = _fit_source(source, hyperprior).model.parameters()
    return tuple(float(value) for each in parameters for value in each.detach().flatten())


@lru_cache(maxsize=16)
def _fit_source(source: Source, hyperprior: Hyperprior) -> Surrogate:
    """Return the model of a source; its hyperparameters are fitted unless they are known."""
    seen = tuple(one for one in source.observations if one.measured)
    problem = Problem(source.space, source.task, hyperprior=hyperprior)
    return _fit(problem, seen, source.hyperparameters)


@lru_cache(maxsize=16)
def _fit(
    problem: Problem,
    observations: tuple[Observation, ...],
    hyperparameters: tuple[float, ...] = (),
    select_sources: bool = True,
) -> Surrogate:
    space = problem.space
    seen = observations or (Observation(space.default, 1.0, 1.0),)
    features = Features.of(space)
    points = encode_all(space, [one.strategy for one in seen])
    hyperprior = problem.hyperprior
    cost = cost_model_prior(space, problem.task, observations, hyperprior)
    cost_priors = [] if cost is None else [cost]
    sources = _source_priors(problem, cost)
    priors = (*cost_priors, *normalize_weights(sources))
    surrogate = _fitted(hyperprior, features, priors, points, seen, hyperparameters)
    if select_sources and sources and len(observations) >= FEWEST_TO_JUDGE:
        dropped = sources_to_drop(surrogate.model, len(cost_priors))
        if dropped:
            kept = normalize_weights([each for each in sources if each.name not in dropped])
            surrogate = _fitted(
                hyperprior, features, (*cost_priors, *kept), points, seen, (), dropped
            )
    return surrogate


def _fitted(
    hyperprior: Hyperprior,
    features: Features,
    priors: tuple[PriorFunction, ...],
    points: FloatArray,
    seen: tuple[Observation, ...],
    hyperparameters: tuple[float, ...],
    dropped: Mapping[str, float] = MappingProxyType({}),
) -> Surrogate:
    spread = hyperprior.unexplained_spread if priors else hyperprior.spread
    basis = design_matrix(priors, points)
    times = StepTimes.of(seen, basis, prior_means(priors), prior_stds(priors), spread)
    with isolated():
        model = MultiTaskGP(features, priors, points, times, hyperprior)
        if not hyperparameters:
            _optimize(model)
        elif not _set(model, hyperparameters):
            model = MultiTaskGP(features, priors, points, times, hyperprior)
            _optimize(model)
    return Surrogate(model, dropped)


def _set(model: MultiTaskGP, hyperparameters: tuple[float, ...]) -> bool:
    """Set the hyperparameters; return whether they are usable ones of such a model."""
    parameters = list(model.parameters())
    sizes = [each.numel() for each in parameters]
    if len(hyperparameters) != sum(sizes):
        return False
    values = torch.tensor(hyperparameters, dtype=torch.float64).split(sizes)
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value.reshape(parameter.shape))
        try:
            return all(bool(each.isfinite().all()) for each in model.factorization)
        except (RuntimeError, NotPSDError):
            return False


def as_fitted(source: Source, task: Task | None) -> Source:
    """Return a source with the task under whose cost model its model is fitted.

    One without a cost model of its own is fitted under the target's: its function is then what that
    leaves unexplained, and the cost model holds where the source has no trials.

    Args:
        source: The source.
        task: The target's task.
    """
    if cost_model_of(task) is None or cost_model_of(source.task) is not None:
        return source
    return replace(source, task=task, hyperparameters=())


def _source_priors(problem: Problem, cost: PriorFunction | None) -> list[PriorFunction]:
    """Return the prior functions of the related tasks; a task that cannot be fitted is skipped."""
    found: list[PriorFunction] = []
    hyperprior = problem.hyperprior
    for source in problem.sources:
        with contextlib.suppress(AutosyncError):
            if cost is None:
                model = _fit_source(source, hyperprior).model
                known = source_posterior(model, source.space, problem.space, own=False)
                prior = source_task_prior(source, known, hyperprior)
                found += drop_constant(problem.space, [prior])
                continue
            fitted = as_fitted(source, problem.task)
            found += _own_functions(problem.space, fitted, hyperprior)
    return found


@lru_cache(maxsize=64)
def _own_functions(
    space: SearchSpace, source: Source, hyperprior: Hyperprior
) -> tuple[PriorFunction, ...]:
    """Return the prior function of a source without the cost model; none if it is constant.

    It does not depend on the target's trials, so it is cached.

    Raises:
        AutosyncError: The source cannot be fitted.
    """
    surrogate = _fit_source(source, hyperprior)
    known = source_posterior(surrogate.model, source.space, space, own=True)
    kept = drop_constant(space, [source_task_prior(source, known, hyperprior)])
    spread = hyperprior.unexplained_spread
    return tuple(discount_implausible(space, prior, spread) for prior in kept)


def _optimize(model: MultiTaskGP) -> None:
    """Maximize the posterior density of the hyperparameters, in place.

    An attempt that fails numerically is repeated with more jitter; after that the mode of the prior
    stays.
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
        except _NUMERICAL:
            pass
        model.load_state_dict(start)
    objective.eval()
