"""What is known of a task before its first trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvd_autosync.learner.observation import Observation
from hvd_autosync.search_space import SearchSpace, Task

if TYPE_CHECKING:
    from hvd_autosync.learner.points import FloatArray


@dataclass(frozen=True)
class Source:
    """A related task that was tuned before.

    Attributes:
        study_id: The study that did it.
        task: What was tuned; ``None`` where that is not known.
        space: The space that was searched.
        observations: What its trials taught.
        similarity: How much like the target it looks: from 0, not at all, to 1, the same.
    """

    study_id: str
    task: Task | None
    space: SearchSpace
    observations: tuple[Observation, ...]
    similarity: float


@dataclass(frozen=True)
class Problem:
    """What a learner works on.

    Attributes:
        space: What may be varied.
        task: What is tuned, from which the cost model predicts; ``None``: no cost model.
        sources: Related tasks, the most similar first.
        steps: Steps of a trial, which take longer under a slow strategy; 0: all trials cost
            the same.
        usable: The chance that what stands at each of some points may be used at all, ``n x d`` to
            ``(n,)``; ``None``: everything may.
    """

    space: SearchSpace
    task: Task | None = None
    sources: tuple[Source, ...] = ()
    steps: int = 0
    feasible: Callable[[FloatArray], FloatArray] | None = None
