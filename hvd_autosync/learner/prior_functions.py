"""Prior functions: the cost model and related tasks as basis functions with Gaussian weights.

A prior function predicts the logarithm of the step time over that of the default, as a weighted sum
of its basis functions. Each weight has a Gaussian prior, which the trials of the task update
(:mod:`hvd_autosync.learner.gp`): a prior function that is wrong for this task soon has little
influence.

``n``: number of points; ``d``: dimension of the space; ``m``: basis functions of one prior
function; ``e``: basis functions of all prior functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

import numpy as np

from hvd_autosync.cost import CostModel, calibrate
from hvd_autosync.cost.calibration import PRIOR_DEVIATIONS
from hvd_autosync.cost.coefficients import Coefficients
from hvd_autosync.cost.columns import Columns
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.learner.hyperprior import SHIPPED, Hyperprior
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import FloatArray, sobol_points
from hvd_autosync.learner.problem import Source
from hvd_autosync.learner.source_posterior import SourcePosterior
from hvd_autosync.search_space import SearchSpace, Task
from hvd_autosync.search_space.catalogue import REGISTRY

#: From points, ``n x d``, to the values of ``m`` basis functions, ``n x m``.
Basis = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True)
class PriorFunction:
    """A prediction that the model starts from: basis functions and the prior of their weights.

    Attributes:
        name: :data:`COST_MODEL`, or the id of a related task's study.
        basis: The basis functions; their weighted sum is the logarithm of the step time over that
            of the default.
        prior_mean: Prior means of the ``m`` weights.
        prior_std: Prior standard deviations of the weights.
        source: Of a related task the posterior of its function, whose mean is the one basis
            function.
    """

    name: str
    basis: Basis
    prior_mean: tuple[float, ...]
    prior_std: tuple[float, ...]
    source: SourcePosterior | None = None


def design_matrix(priors: Sequence[PriorFunction], points: FloatArray) -> FloatArray:
    """Return the values of all basis functions at points, shape ``n x e``."""
    return np.concatenate(
        [np.empty((len(points), 0)), *(prior.basis(points) for prior in priors)], axis=1
    )


def prior_means(priors: Sequence[PriorFunction]) -> FloatArray:
    """Prior means of all weights, shape ``(e,)``."""
    return np.array([mean for prior in priors for mean in prior.prior_mean])


def prior_stds(priors: Sequence[PriorFunction]) -> FloatArray:
    """Prior standard deviations of all weights, shape ``(e,)``."""
    return np.array([std for prior in priors for std in prior.prior_std])


#: Name of the cost model among the prior functions.
COST_MODEL = "cost model"
#: Prior mean of the weight of the uncalibrated cost model.
_COST_MEAN = 1.0
#: A related task is constant if its function at so many points differs by less than 1 %.
_SAMPLE_POINTS, _MIN_RANGE = 64, 0.01
#: Largest plausible spread of a residual, in units of the usual one. On the tables in
#: benchmarks/traces related sources reach 0.2 to 2 units, adversarial and unrelated ones 0.5 to 8.
_PLAUSIBLE = 2.0


def cost_model_prior(
    space: SearchSpace,
    task: Task | None,
    observations: Sequence[Observation],
    hyperprior: Hyperprior = SHIPPED,
) -> PriorFunction | None:
    """Return the cost model of a task as a prior function.

    ``None`` if the task has no cost model, or one that gets the values of no knob of ``space``. One
    that predicts the same for all strategies counts: that nothing matters is not that nothing is
    known.

    The cost model is linearized in the logarithms of its factors (:class:`Coefficients`) at their
    most likely values after the trials. The first basis function is the linearization at factors
    of 1 (logarithms of 0), the others are its slopes; the logarithms of the factors are their
    weights. The trials determine only the point of linearization: the priors of the weights are
    those before any trial, because the model learns the weights from the same trials.

    Raises:
        SpaceError: An observed strategy does not lie in ``space``.
    """
    model = cost_model_of(task)
    if model is None or not any(_is_priced(knob.name) for knob in space.knobs):
        return None
    fixed = dict(space.fixed)
    seen = [({**fixed, **one.strategy}, one.step_s) for one in observations if one.measured]
    strategies, step_s = [s for s, _ in seen], [t for _, t in seen if t is not None]
    factors = np.array(astuple(calibrate(model, strategies, step_s).coefficients))
    # The simulation has small jumps, so slopes are differences over half a prior deviation.
    around = [factors, *(factors + np.diag(PRIOR_DEVIATIONS / 2))]
    coefficients = [Coefficients(*each) for each in around]

    def tangent(points: FloatArray) -> FloatArray:
        log_s = np.log(model.seconds(Columns.at(space, points), coefficients))
        slopes = (log_s[1:] - log_s[0]).T / (PRIOR_DEVIATIONS / 2)
        return np.column_stack([log_s[0] - slopes @ factors, slopes])

    default = tangent(space.encode(space.default)[np.newaxis])
    return PriorFunction(
        COST_MODEL,
        lambda points: tangent(points) - default,
        (_COST_MEAN, *(0.0 for _ in factors)),
        (hyperprior.cost_deviation, *PRIOR_DEVIATIONS.tolist()),
    )


def _is_priced(knob: str) -> bool:
    """Return whether the cost model gets the values of a knob."""
    return knob in REGISTRY and bool(REGISTRY[knob].cost)


@lru_cache(maxsize=16)
def cost_model_of(task: Task | None) -> CostModel | None:
    """Return the cost model of a task; ``None`` if its links or times are not known."""
    if task is None:
        return None
    try:
        return CostModel(task.model, task.resources)
    except ConfigurationError:
        return None


def source_task_prior(
    source: Source, known: SourcePosterior, hyperprior: Hyperprior = SHIPPED
) -> PriorFunction:
    """Return a related task as a prior function; the mean of its weight is its similarity.

    Args:
        source: The related task.
        known: The posterior of its function.
        hyperprior: The prior of its weight.
    """

    def basis(points: FloatArray) -> FloatArray:
        return known.mean(points)[:, np.newaxis]

    weight, deviation = (source.similarity,), (hyperprior.source_deviation,)
    return PriorFunction(source.study_id, basis, weight, deviation, known)


def normalize_weights(priors: Sequence[PriorFunction]) -> list[PriorFunction]:
    """Scale the mean weights of prior functions of one basis function to a sum of at most 1."""
    total = max(sum(prior.prior_mean[0] for prior in priors), 1.0)
    scaled = [(prior.prior_mean[0] / total,) for prior in priors]
    return [replace(prior, prior_mean=mean) for prior, mean in zip(priors, scaled, strict=True)]


def discount_implausible(space: SearchSpace, prior: PriorFunction, usual: float) -> PriorFunction:
    """Multiply the mean weight of ``prior`` by the square of its plausibility.

    The residual of a cost model should vary over strategies about as much as on other tasks. A
    source whose residual varies much more has measured another kind of task, or something other
    than step times. It may still be right, and trials can show it, so the standard deviation of
    its weight stays.

    Args:
        space: The space.
        prior: A prior function of one basis function: a residual of the cost model.
        usual: Usual standard deviation of the log residual of a cost model.
    """
    spread = float(prior.basis(sobol_points(space, _SAMPLE_POINTS, 0)).std())
    plausibility = min(1.0, _PLAUSIBLE * usual / max(spread, _MIN_RANGE)) ** 2
    mean = tuple(plausibility * each for each in prior.prior_mean)
    return replace(prior, prior_mean=mean)


def drop_constant(space: SearchSpace, priors: Sequence[PriorFunction]) -> list[PriorFunction]:
    """Return those of the ``priors`` of related tasks whose functions differ between strategies.

    Their weights do not count, because trials may raise a small one.
    """
    points = sobol_points(space, _SAMPLE_POINTS, 0)
    return [prior for prior in priors if np.ptp(prior.basis(points)) >= _MIN_RANGE]
