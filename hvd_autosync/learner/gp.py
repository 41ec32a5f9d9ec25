"""The surrogate: a Gaussian process of the logarithm of the step time over one space.

``n``: number of observations or strategies; ``d``: dimension of the space. The GP sees *speed*,
minus the standardized logarithm of the step time, because BoTorch maximizes. It starts from what
experts predict (:mod:`hvd_autosync.learner.prior_functions`): the cost model, and related tasks,
each of which is a model of its own; what they leave open is a GP of the knobs. So the target of
this multi-task GP is a weighted sum of its sources' functions and a function of its own, with the
sources' taken at their posterior means. Its noise is what each trial's own steps say
(heteroscedastic, known) plus what launches of one strategy differ by (homoscedastic, learned).
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
    deviations,
    discount_implausible,
    drop_constant,
    normalize_weights,
    source_task_prior,
    weights,
)
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.learner.source_selection import FEWEST_TO_JUDGE, sources_to_drop
from hvd_autosync.learner.surrogate import Surrogate, model_inputs
from hvd_autosync.search_space import SearchSpace

#: Most iterations of the fit; more change the likelihood little and cost most of the time.
_FIT_ITERATIONS = 75
#: Relative difference between launches of one strategy: most likely value, and the deviation of
#: the logarithm of its variance (0.4 % to 9 % lie within two of them, as the fit sees it: in
#: logarithms around the most likely value). On machines that are
#: shared, 5 % and more were measured (benchmarks/README.md).
_RELAUNCH_NOISE, _RELAUNCH_DEVIATION = 0.02, 1.5
#: Smallest noise variances in the model's unit, for the factorization's sake.
_NOISE_FLOOR = 1e-6
_JITTERS = (1e-8, 1e-4)
#: How much strategies differ before anything is known, the median of benchmarks/traces' spread
#: points (0.13 to 0.83); and from what experts say.
_SPREAD, _UNEXPLAINED_SPREAD = 0.5, 0.12


def fit(problem: Problem, observations: Sequence[Observation]) -> Surrogate:
    """Fit the model to all observations of one problem.

    Proposing, deciding whether to go on and choosing candidates all ask for the same fit, so the
    last ones are remembered: a surrogate never changes once it is fitted.

    It never fails on odd data: failed trials say nothing of times (:mod:`feasibility` learns from
    them), and where the hyperparameters cannot be optimized the most likely ones of the prior are
    used. Without any observation the answer is the prior around one second.

    Raises:
        SpaceError: An observed strategy does not lie in the problem's space.
    """
    # Nothing else of a problem is learned from, and the rest differs between who asks.
    known = Problem(problem.space, problem.task, problem.sources)
    return _fit(known, tuple(seen for seen in observations if seen.measured))


@lru_cache(maxsize=16)
def _fit(problem: Problem, observations: tuple[Observation, ...]) -> Surrogate:
    space = problem.space
    seen = observations or (Observation(space.default, 1.0, 1.0),)
    features = Features.of(space)
    points = encode_all(space, [one.strategy for one in seen])
    cost = cost_model_prior(space, problem.task, observations)
    physics = [] if cost is None else drop_constant(space, [cost])
    sources = _source_task_priors(problem, cost)
    surrogate = _fitted(features, (*physics, *normalize_weights(sources)), points, seen)
    if sources and len(observations) >= FEWEST_TO_JUDGE:
        dropped = sources_to_drop(surrogate.model, surrogate.experts, len(physics))
        if dropped:
            kept = normalize_weights([each for each in sources if each.name not in dropped])
            surrogate = _fitted(features, (*physics, *kept), points, seen, dropped)
    return surrogate


def _fitted(
    features: Features,
    experts: tuple[PriorFunction, ...],
    points: FloatArray,
    seen: tuple[Observation, ...],
    dropped: Mapping[str, float] = MappingProxyType({}),
) -> Surrogate:
    spread = _SPREAD if not experts else _UNEXPLAINED_SPREAD
    said = design_matrix(experts, points)
    targets = OutcomeTransform.of(seen, said, weights(experts), deviations(experts), spread)
    with isolated():
        inputs = model_inputs(features, said, points, targets.scale)
        model = _build(features, experts, inputs, targets)
        _optimize(model)
    return Surrogate(model, features, experts, targets, dropped)


def _source_task_priors(problem: Problem, cost: PriorFunction | None) -> list[PriorFunction]:
    """The related tasks; one that cannot be learned from is left out."""
    found: list[PriorFunction] = []
    for source in problem.sources:
        with contextlib.suppress(AutosyncError):
            surrogate = fit(Problem(source.space, source.task), source.observations)
            if cost is not None and surrogate.has_cost_model:
                found += _residuals_of_sources(problem.space, source)
            else:
                expert = source_task_prior(problem.space, source, surrogate.mean_at, cost)
                said = drop_constant(problem.space, [expert])
                found += said if cost is None else _believable(problem.space, said)
    return found


@lru_cache(maxsize=64)
def _residuals_of_sources(space: SearchSpace, source: Source) -> tuple[PriorFunction, ...]:
    """What a source says beyond its cost model, whatever the target's trials; if it says anything.

    Raises:
        AutosyncError: It cannot be learned from.
    """
    surrogate = fit(Problem(source.space, source.task), source.observations)
    expert = source_task_prior(space, source, surrogate.residual_mean_at)
    return tuple(_believable(space, drop_constant(space, [expert])))


def _believable(space: SearchSpace, experts: Sequence[PriorFunction]) -> list[PriorFunction]:
    """Experts on what is beyond physics, each believed as much as is plausible."""
    return [discount_implausible(space, expert, _UNEXPLAINED_SPREAD) for expert in experts]


def _build(
    features: Features, experts: Sequence[PriorFunction], inputs: Tensor, targets: OutcomeTransform
) -> SingleTaskGP:
    """The model with the most likely hyperparameters of the prior."""
    speed = torch.from_numpy(-(targets.log_step - targets.center) / targets.scale)
    known = torch.from_numpy(targets.variance / targets.scale**2)
    relaunch = max((_RELAUNCH_NOISE / targets.scale) ** 2, 2 * _NOISE_FLOOR)
    # The mode of a log-normal density is exp(location - deviation^2).
    location = math.log(relaunch) + _RELAUNCH_DEVIATION**2
    likelihood = FixedNoiseGaussianLikelihood(
        noise=known.clamp_min(_NOISE_FLOOR),
        learn_additional_noise=True,
        noise_prior=LogNormalPrior(location, _RELAUNCH_DEVIATION),
        noise_constraint=GreaterThan(_NOISE_FLOOR, initial_value=relaunch),
    )
    believed, unsure = (torch.from_numpy(each(experts)) for each in (weights, deviations))
    model = SingleTaskGP(
        inputs,
        speed.unsqueeze(-1),
        likelihood=likelihood,
        covar_module=MixedKernel(len(features.numeric), features.categorical_count, unsure),
        mean_module=PriorMean(believed),
        outcome_transform=None,
    )
    return model.to(inputs)


def _optimize(model: SingleTaskGP) -> None:
    """Maximize the posterior density of the hyperparameters, in place.

    Tried twice, the second time with more jitter; then the prior's most likely values stay.
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
