"""Predictions of those who know something before the first trial: the cost model, related tasks.

An expert gives one number per point, the logarithm of the step time over that of the default. The
model believes it with a weight of its own, which the task's trials correct (:mod:`gp`), so that an
expert who is wrong here is soon not heard.

``n``: number of points; ``d``: dimension of the space; ``e``: number of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hvd_autosync.cost import Calibration, CostModel, calibrate
from hvd_autosync.cost.columns import Columns
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import FloatArray, sobol_points
from hvd_autosync.learner.problem import Source
from hvd_autosync.learner.translation import translated
from hvd_autosync.search_space import SearchSpace, Task

#: From points, ``n x d``, to an expert's numbers, shape ``(n,)``.
Opinion = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True)
class Expert:
    """Somebody whose predictions the model starts from.

    Attributes:
        name: :data:`COST_MODEL`, or the study of a related task.
        opinion: Logarithm of the step time over the default's, at points of the space.
        weight: How much of it is believed before any trial.
        deviation: Standard deviation of that.
    """

    name: str
    opinion: Opinion
    weight: float
    deviation: float


def opinions(experts: Sequence[Expert], points: FloatArray) -> FloatArray:
    """What ``experts`` say of points, shape ``n x e``."""
    columns = [expert.opinion(points) for expert in experts]
    return np.stack(columns, axis=1) if columns else np.empty((len(points), 0))


#: Name of the cost model among experts.
COST_MODEL = "cost model"
#: Weight of the cost model, and its deviation.
_COST_WEIGHT, _COST_DEVIATION = 1.0, 0.3
#: Standard deviation of a related task's weight.
_SOURCE_DEVIATION = 0.4
#: Who says of so many strategies that they differ by less than 1 % says nothing.
_ASKED_ABOUT, _SAYS_SOMETHING = 64, 0.01


def cost_expert(
    space: SearchSpace, task: Task | None, observations: Sequence[Observation]
) -> Expert | None:
    """The cost model of a task, calibrated to its trials; ``None`` where there can be none.

    Raises:
        SpaceError: An observed strategy does not lie in ``space``.
    """
    model = None if task is None else _cost_model(task)
    if model is None:
        return None
    held = dict(space.fixed)
    seen = [({**held, **one.strategy}, one.step_s) for one in observations if one.measured]
    strategies, step_s = [s for s, _ in seen], [t for _, t in seen if t is not None]
    calibration: Calibration = calibrate(model, strategies, step_s)
    default = space.encode(space.default)[np.newaxis]

    def log_step(points: FloatArray) -> FloatArray:
        steps = model.prepare(Columns.at(space, points))
        return np.asarray(np.log(steps.seconds([calibration.coefficients])[0]))

    level = float(log_step(default)[0])
    return Expert(
        COST_MODEL, lambda points: log_step(points) - level, _COST_WEIGHT, _COST_DEVIATION
    )


@lru_cache(maxsize=16)
def _cost_model(task: Task) -> CostModel | None:
    """The cost model of a task, unless its links or times are not known."""
    try:
        return CostModel(task.model, task.resources)
    except ConfigurationError:
        return None


def source_expert(space: SearchSpace, source: Source, taught: Opinion) -> Expert:
    """What a related task has taught, believed as much as it is similar.

    Args:
        space: The target's space.
        source: The related task.
        taught: Its log step time, up to a constant, at points of its own space.
    """

    def log_step(points: FloatArray) -> FloatArray:
        return taught(translated(space, points, source.space))

    level = float(log_step(space.encode(space.default)[np.newaxis])[0])
    return Expert(
        source.study_id, lambda points: log_step(points) - level, source.similarity,
        _SOURCE_DEVIATION,
    )  # fmt: skip


def beyond(expert: Expert, known: Expert) -> Expert:
    """What ``expert`` says beyond what ``known`` says, so that it does not count twice."""
    return replace(
        expert, opinion=lambda points: expert.opinion(points) - known.opinion(points)
    )


def sharing(experts: Sequence[Expert]) -> list[Expert]:
    """Experts on the same matter, with weights that do not sum to more than 1."""
    total = max(sum(expert.weight for expert in experts), 1.0)
    return [replace(expert, weight=expert.weight / total) for expert in experts]


def with_something_to_say(space: SearchSpace, experts: Sequence[Expert]) -> list[Expert]:
    """Those of ``experts`` who do not say about the same of all strategies."""
    if space.dimension == 0:
        return []
    points = sobol_points(space, _ASKED_ABOUT, 0)
    return [expert for expert in experts if np.ptp(expert.opinion(points)) >= _SAYS_SOMETHING]
