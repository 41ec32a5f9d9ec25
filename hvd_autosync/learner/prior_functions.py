"""Predictions of those who know something before the first trial: the cost model, related tasks.

An expert says for each point the logarithm of the step time over that of the default, as one number
or as a sum of several. The model believes each with a weight of its own, which the task's trials
correct (:mod:`gp`), so that an expert who is wrong here is soon not heard.

``n``: number of points; ``d``: dimension of the space; ``e``: numbers that all experts say of a
point.
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
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import FloatArray, sobol_points
from hvd_autosync.learner.problem import Source
from hvd_autosync.learner.projection import project_onto_space
from hvd_autosync.search_space import SearchSpace, Task

#: From points, ``n x d``, to logarithms of the step time, shape ``(n,)``.
LogStep = Callable[[FloatArray], FloatArray]
#: From points, ``n x d``, to what an expert of ``m`` numbers says of them, ``n x m``.
Basis = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True)
class PriorFunction:
    """Somebody whose predictions the model starts from.

    Attributes:
        name: :data:`COST_MODEL`, or the study of a related task.
        opinion: Of the logarithm of the step time over the default's, at points of the space.
        weights: How much of each number is believed before any trial.
        deviations: Standard deviations of that.
        likely: Weights that the expert itself holds for the most likely now.
    """

    name: str
    basis: Basis
    weights: tuple[float, ...]
    deviations: tuple[float, ...]
    likely: tuple[float, ...]

    def expected(self, points: FloatArray) -> FloatArray:
        """The most likely logarithm of the step time over the default's, shape ``(n,)``."""
        expected: FloatArray = self.basis(points) @ np.array(self.likely)
        return expected


def design_matrix(experts: Sequence[PriorFunction], points: FloatArray) -> FloatArray:
    """What ``experts`` say of points, shape ``n x e``."""
    return np.concatenate(
        [np.empty((len(points), 0)), *(expert.basis(points) for expert in experts)], axis=1
    )


def weights(experts: Sequence[PriorFunction]) -> FloatArray:
    """How much of their numbers is believed before any trial, shape ``(e,)``."""
    return np.array([weight for expert in experts for weight in expert.weights])


def deviations(experts: Sequence[PriorFunction]) -> FloatArray:
    """Standard deviations of :func:`weights`, shape ``(e,)``."""
    return np.array([deviation for expert in experts for deviation in expert.deviations])


#: Name of the cost model among experts.
COST_MODEL = "cost model"
#: Weight of what the cost model says without any trial, and its deviation.
_COST_WEIGHT, _COST_DEVIATION = 1.0, 0.3
#: Standard deviation of a related task's weight.
_SOURCE_DEVIATION = 0.4
#: Who says of so many strategies that they differ by less than 1 % says nothing.
_ASKED_ABOUT, _SAYS_SOMETHING = 64, 0.01
#: How many times what a cost model usually leaves open is still plausible. Of the tables in
#: benchmarks/traces honest tasks say 0.2 to 2 times that, liars and strangers 0.5 to 8 times.
_PLAUSIBLE = 2.0


def cost_model_prior(
    space: SearchSpace, task: Task | None, observations: Sequence[Observation]
) -> PriorFunction | None:
    """The cost model of a task; ``None`` where there can be none.

    Its first number is what it says without any trial, the others how that changes with each of
    its factors, whose logarithms are the weights: as they are believed before any trial, since the
    model learns them from the trials itself. Both are those of the tangent at the factors that
    are the most likely after the trials; only this place is taken from there.

    Raises:
        SpaceError: An observed strategy does not lie in ``space``.
    """
    model = None if task is None else _cost_model(task)
    if model is None:
        return None
    held = dict(space.fixed)
    seen = [({**held, **one.strategy}, one.step_s) for one in observations if one.measured]
    strategies, step_s = [s for s, _ in seen], [t for _, t in seen if t is not None]
    factors = np.array(astuple(calibrate(model, strategies, step_s).coefficients))
    # Slopes over about what a factor may still change by: a simulation has small jumps.
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
        (_COST_WEIGHT, *(0.0 for _ in factors)),
        (_COST_DEVIATION, *PRIOR_DEVIATIONS.tolist()),
        (_COST_WEIGHT, *factors.tolist()),
    )


@lru_cache(maxsize=16)
def _cost_model(task: Task) -> CostModel | None:
    """The cost model of a task, unless its links or times are not known."""
    try:
        return CostModel(task.model, task.resources)
    except ConfigurationError:
        return None


def source_task_prior(
    space: SearchSpace, source: Source, taught: LogStep, known: PriorFunction | None = None
) -> PriorFunction:
    """What a related task has taught, believed as much as it is similar.

    Args:
        space: The target's space.
        source: The related task.
        taught: Its log step time, up to a constant, at points of its own space.
        known: Who has said a part of it already, which is not to count twice.
    """

    def log_step(points: FloatArray) -> FloatArray:
        said = taught(project_onto_space(space, points, source.space))
        return said if known is None else said - known.expected(points)

    level = float(log_step(space.encode(space.default)[np.newaxis])[0])
    weight = (source.similarity,)
    return PriorFunction(
        source.study_id,
        lambda points: (log_step(points) - level)[:, np.newaxis],
        weight,
        (_SOURCE_DEVIATION,),
        weight,
    )


def normalize_weights(experts: Sequence[PriorFunction]) -> list[PriorFunction]:
    """Experts of one number on the same matter, with weights that do not sum to more than 1."""
    total = max(sum(expert.weights[0] for expert in experts), 1.0)
    shared = [(expert.weights[0] / total,) for expert in experts]
    return [
        replace(expert, weights=weight, likely=weight)
        for expert, weight in zip(experts, shared, strict=True)
    ]


def discount_implausible(space: SearchSpace, expert: PriorFunction, usual: float) -> PriorFunction:
    """``expert`` with its weight times the square of how plausible what it says is.

    It tells what the cost model does not know, and should differ between strategies by about as
    much as on other tasks. Whoever says much more has measured a task of another kind or told
    something else than step times. It can still be right, and trials can tell: the deviation of its
    weight stays.

    Args:
        space: The space.
        expert: Of one number, of what is beyond the cost model.
        usual: Standard deviation of the logarithm of what a cost model leaves open.
    """
    said = float(expert.basis(sobol_points(space, _ASKED_ABOUT, 0)).std())
    share = min(1.0, _PLAUSIBLE * usual / max(said, _SAYS_SOMETHING)) ** 2
    weight = tuple(share * believed for believed in expert.weights)
    return replace(expert, weights=weight, likely=weight)


def drop_constant(space: SearchSpace, experts: Sequence[PriorFunction]) -> list[PriorFunction]:
    """Those of ``experts`` who do not say about the same of all strategies."""
    points = sobol_points(space, _ASKED_ABOUT, 0)
    return [expert for expert in experts if np.ptp(expert.expected(points)) >= _SAYS_SOMETHING]
