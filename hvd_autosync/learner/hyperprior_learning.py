"""Learning of the hyperprior from tasks that were measured before.

Each task is fitted by itself under a wide hyperprior. The estimates of all tasks then give the
priors of the next one: location and spread of their logarithms (empirical Bayes; Gelman et al.,
"Bayesian Data Analysis", 3rd edition, section 5.1). Whether that helps is measured on tasks that
are left out: by the log density of trials that the model has not seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hvd_autosync.learner.gp import fit
from hvd_autosync.learner.hyperprior import SHIPPED, Hyperprior, Provenance
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import encode_all
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.learner.similarity import similarity
from hvd_autosync.learner.surrogate import Surrogate
from hvd_autosync.search_space import Strategy
from hvd_autosync.util.amounts import amount

#: Deviation of the weights under which single tasks are fitted: wide enough not to matter.
_WIDE = 1.0
#: Smallest deviation of the launch noise. All tasks of a store may come from one cluster, and the
#: next one from another, that is half or twice as noisy.
_LEAST_NOISE_DEVIATION = 1.3
#: Smallest share of the variance of repetitions that is between launches.
_LEAST_SHARE = 0.1
#: Smallest deviation of a weight.
_LEAST_WEIGHT_DEVIATION = 0.1
#: Fewest tasks.
_FEWEST_TASKS = 3
#: Fewest measured trials of a task, and most that are fitted.
_FEWEST, _MOST = 20, 80
#: Tasks of this similarity and more count as related.
_RELATED = 0.1
#: Trials that the model has seen when it predicts the next ones, and how many it predicts.
_SEEN, _NEXT = (2, 4, 8, 16, 32), 8


@dataclass(frozen=True)
class Estimates:
    """What one task tells, in logarithms of the step time; NaN where it cannot.

    Attributes:
        launch_noise: Standard deviation between launches of one strategy, from its repetitions.
        spread: Standard deviation over strategies.
        unexplained_spread: That of what its cost model does not explain.
        cost_weight: Weight of its cost model.
        source_weights: Weight of each related task minus its similarity.
    """

    launch_noise: float
    spread: float
    unexplained_spread: float
    cost_weight: float
    source_weights: tuple[float, ...]


def learn(tasks: Sequence[Source], learned_at: str, note: str) -> Hyperprior:
    """Return the hyperprior that the tasks give.

    Args:
        tasks: Measured tasks; those of fewer than 20 measured trials are left out.
        learned_at: The day, ISO 8601.
        note: Where they were measured.

    Raises:
        ValueError: Fewer than three tasks have enough trials.
    """
    used = [each for each in tasks if len(_measured(each)) >= _FEWEST]
    if len(used) < _FEWEST_TASKS:
        raise ValueError(
            f"{amount(len(used), 'task')} with {_FEWEST} measured trials or more; "
            f"{_FEWEST_TASKS} are needed"
        )
    trials = sum(len(_measured(each)) for each in used)
    names = tuple(each.study_id for each in used)
    provenance = Provenance(learned_at, names, trials, note)
    return _combined([_estimates(each, used) for each in used], provenance)


def held_out_scores(
    tasks: Sequence[Source], learned_at: str, note: str
) -> Iterator[tuple[str, float, float]]:
    """Yield for each task how well trials are predicted that the model has not seen.

    A task is left out if it has few trials itself, or fewer than three others have enough.

    Yields:
        Name of the task; mean log density per trial under the shipped hyperprior; that under the
        hyperprior learned from the tasks that are not of its model and cluster.
    """
    for task in tasks:
        if len(_measured(task)) < max(_SEEN) + _NEXT:
            continue
        others = [each for each in tasks if not _same_task(each, task)]
        if sum(len(_measured(each)) >= _FEWEST for each in others) < _FEWEST_TASKS:
            continue
        learned = learn(others, learned_at, note)
        yield task.study_id, _predicts(task, SHIPPED), _predicts(task, learned)


def _same_task(one: Source, other: Source) -> bool:
    if one.task is None or other.task is None:
        return one.study_id == other.study_id
    return one.task.fingerprint == other.task.fingerprint


def _measured(task: Source) -> list[Observation]:
    return [seen for seen in task.observations if seen.measured]


def _sampled(task: Source) -> list[Observation]:
    """At most 80 measured trials, evenly spaced in their order."""
    measured = _measured(task)
    count = min(len(measured), _MOST)
    return [measured[index * len(measured) // count] for index in range(count)]


def _estimates(task: Source, others: Sequence[Source]) -> Estimates:
    wide = replace(SHIPPED, cost_deviation=_WIDE, source_deviation=_WIDE)
    seen = _sampled(task)
    alone = fit(Problem(task.space, hyperprior=wide), seen)
    with_cost = fit(Problem(task.space, task.task, hyperprior=wide), seen)
    explained = with_cost.has_cost_model
    return Estimates(
        launch_noise=_repeated(_measured(task)),
        spread=_own_spread(alone),
        unexplained_spread=_own_spread(with_cost) if explained else math.nan,
        cost_weight=_weights(with_cost)[0] if explained else math.nan,
        source_weights=tuple(_source_weights(task, others, seen, wide)),
    )


def _source_weights(
    task: Source, others: Sequence[Source], seen: Sequence[Observation], wide: Hyperprior
) -> Iterator[float]:
    for other in others:
        if task.task is None or other.task is None or _same_task(task, other):
            continue
        alike = similarity(task.task, other.task)
        if alike < _RELATED:
            continue
        source = replace(other, observations=tuple(_sampled(other)), similarity=alike)
        problem = Problem(task.space, task.task, (source,), hyperprior=wide)
        # Sources of negative transfer count, too: their weights stray most.
        model = fit(problem, seen, select_sources=False)
        if model.priors and model.priors[-1].name == source.study_id:
            yield _weights(model)[-1] - model.priors[-1].prior_mean[0]


def _repeated(measured: Sequence[Observation]) -> float:
    """Standard deviation between launches of one strategy, from repeated measurements.

    What the steps of each trial explain is taken off, because the model knows it and adds it.
    """
    by_strategy: dict[Strategy, list[Observation]] = {}
    for seen in measured:
        by_strategy.setdefault(seen.strategy, []).append(seen)
    squares = known = 0.0
    freedom = 0
    for repeated in by_strategy.values():
        squares += len(repeated) * float(np.var([seen.log_step for seen in repeated]))
        of_steps = float(np.mean([seen.log_variance for seen in repeated]))
        known += (len(repeated) - 1) * of_steps  # its expected part of the squares
        freedom += len(repeated) - 1
    if not freedom:
        return math.nan
    return math.sqrt(max(squares - known, _LEAST_SHARE * squares) / freedom)


def _launch_noise(surrogate: Surrogate) -> float:
    noise = float(surrogate.model.likelihood.second_noise.detach())
    return math.sqrt(noise) * surrogate.model.outcome_transform.scale


def _own_spread(surrogate: Surrogate) -> float:
    weights = surrogate.model.covar_module.own.log_weight.detach().exp()
    return math.sqrt(float(weights.sum())) * surrogate.model.outcome_transform.scale


def _weights(surrogate: Surrogate) -> list[float]:
    """Posterior means of the weights of all basis functions (Rasmussen and Williams, 2.7)."""
    with isolated(), torch.no_grad():
        _, weights = surrogate.model.factorization
        points = surrogate.model.train_inputs[0]
        scale = surrogate.model.outcome_transform.scale
        features = surrogate.model.covar_module.knob_count
        means = [mean for prior in surrogate.priors for mean in prior.prior_mean]
        deviations = [std for prior in surrogate.priors for std in prior.prior_std]
        basis = points[:, features : features + len(means)]
        learned = (basis / scale).T @ weights
    return [m + s**2 * float(w) for m, s, w in zip(means, deviations, learned, strict=True)]


def _combined(estimates: Sequence[Estimates], provenance: Provenance) -> Hyperprior:
    noise, noise_deviation = _logarithms([each.launch_noise for each in estimates])
    spread, _ = _logarithms([each.spread for each in estimates])
    unexplained = [each.unexplained_spread for each in estimates]
    off = [each.cost_weight - 1.0 for each in estimates]
    sources = [weight for each in estimates for weight in each.source_weights]
    return Hyperprior(
        launch_noise=_rounded(math.exp(noise), SHIPPED.launch_noise),
        launch_noise_deviation=_rounded(
            max(2 * noise_deviation, _LEAST_NOISE_DEVIATION), SHIPPED.launch_noise_deviation
        ),
        spread=_rounded(math.exp(spread)),
        unexplained_spread=_rounded(
            math.exp(_logarithms(unexplained)[0]), SHIPPED.unexplained_spread
        ),
        cost_deviation=_rounded(
            max(_root_mean_square(off), _LEAST_WEIGHT_DEVIATION), SHIPPED.cost_deviation
        ),
        source_deviation=_rounded(
            max(_root_mean_square(sources), _LEAST_WEIGHT_DEVIATION), SHIPPED.source_deviation
        ),
        provenance=provenance,
    )


def _rounded(value: float, otherwise: float = math.nan) -> float:
    """``value`` to three digits; ``otherwise`` where no task could tell."""
    return float(f"{value:.3g}") if math.isfinite(value) else otherwise


def _logarithms(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation of the logarithms of the finite values."""
    logs = np.log([value for value in values if math.isfinite(value) and value > 0])
    if not len(logs):
        return math.nan, math.nan
    return float(logs.mean()), float(logs.std(ddof=1)) if len(logs) > 1 else 0.0


def _root_mean_square(values: Sequence[float]) -> float:
    finite = np.array([value for value in values if math.isfinite(value)])
    return float(np.sqrt((finite**2).mean())) if len(finite) else math.nan


def _predicts(task: Source, hyperprior: Hyperprior) -> float:
    """Mean log density of the next trials, each predicted from those before."""
    measured = _measured(task)
    problem = Problem(task.space, task.task, hyperprior=hyperprior)
    densities: list[float] = []
    for count in _SEEN:
        surrogate = fit(problem, measured[:count])
        following = measured[count : count + _NEXT]
        mean, covariance = surrogate.joint_at(
            encode_all(task.space, [seen.strategy for seen in following])
        )
        known = np.array([seen.log_variance for seen in following])
        variance = np.diagonal(covariance) + known + _launch_noise(surrogate) ** 2
        error = np.array([seen.log_step for seen in following]) - mean
        densities += list(-0.5 * (np.log(2 * math.pi * variance) + error**2 / variance))
    return float(np.mean(densities))
