"""The tuning problem: what is known of a task before its first trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvd_autosync.learner.hyperprior import SHIPPED, Hyperprior
from hvd_autosync.learner.observation import Observation
from hvd_autosync.search_space import SearchSpace, Task

if TYPE_CHECKING:
    from hvd_autosync.learner.points import FloatArray


@dataclass(frozen=True)
class Source:
    """A related task that was tuned before.

    Attributes:
        study_id: Id of its study.
        task: The task; ``None`` if it is not known.
        space: The space that was searched.
        observations: The outcomes of its trials.
        similarity: Its similarity to the target, from 0 to 1
            (:mod:`hvd_autosync.learner.similarity`).
        hyperparameters: Those of its fitted model, if they are known
            (:func:`hvd_autosync.learner.gp.source_hyperparameters`); empty: it is fitted.
    """

    study_id: str
    task: Task | None
    space: SearchSpace
    observations: tuple[Observation, ...]
    similarity: float
    hyperparameters: tuple[float, ...] = ()


@dataclass(frozen=True)
class Problem:
    """The input of a learner.

    Attributes:
        space: The search space.
        task: The task, for the cost model; ``None``: no cost model.
        sources: Related tasks, the most similar first.
        steps: Steps of a trial, from which its seconds are predicted; 0: all trials cost the same.
        feasible: From points, ``n x d``, to the probability that each satisfies the quality
            constraint, ``(n,)``; ``None``: all do.
        hyperprior: What is believed of every task.
    """

    space: SearchSpace
    task: Task | None = None
    sources: tuple[Source, ...] = ()
    steps: int = 0
    feasible: Callable[[FloatArray], FloatArray] | None = None
    hyperprior: Hyperprior = SHIPPED
