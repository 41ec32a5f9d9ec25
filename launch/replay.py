"""Trials that were run before, played again: what was measured answers, and no job is started."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hvd_autosync.errors import StudyError
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.search_space import CategoricalKnob, SearchSpace, Strategy, TrialResult, TrialSpec
from hvd_autosync.traces import StudyRecord, TrialRecord


class ReplayRunner:
    """Answers each trial with a recorded one of the same strategy, or of the nearest.

    Repeated measurements of a strategy are played in turn.

    Args:
        study: A study whose space is known.
        trials: Its trials, some of which have ended.

    Attributes:
        distance: Of the strategy played last from the one that was asked for, 0: the same; as of
            :func:`distances`.

    Raises:
        StudyError: There is nothing to play.
    """

    def __init__(self, study: StudyRecord, trials: Sequence[TrialRecord]) -> None:
        told: dict[Strategy, list[TrialResult]] = defaultdict(list)
        for trial in trials:
            if study.space is not None and trial.result is not None:
                told[study.space.complete(trial.strategy)].append(trial.result)
        if study.space is None or not told:
            raise StudyError(
                f"study {study.study_id} has no trials to play",
                hint="Choose another; hvd-autosync traces list shows them.",
            )
        self._space: SearchSpace = study.space
        self._told = dict(told)
        self._played: dict[Strategy, int] = defaultdict(int)
        self._points = np.array([self._space.encode(strategy) for strategy in told])
        self.distance = 0.0

    def run(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """The recorded result; see :class:`hvd_autosync.launch.runner.TrialRunner`."""
        wanted = self._space.complete(spec.strategy)
        apart = distances(self._space, self._points, self._space.encode(wanted))
        nearest = int(apart.argmin())
        self.distance = float(apart[nearest])
        strategy = list(self._told)[nearest]
        results = self._told[strategy]
        result = results[self._played[strategy] % len(results)]
        self._played[strategy] += 1
        return result

    def close(self) -> None:
        """Nothing is open."""


def distances(
    space: SearchSpace, points: npt.NDArray[np.float64], point: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """How far each of ``points``, ``n x d``, is from one, shape ``(n,)``.

    Each choice that differs counts 1, and each number its share of the knob's range.
    """
    apart = np.abs(points - point)
    for index, knob in enumerate(space.knobs):
        if isinstance(knob, CategoricalKnob):
            apart[:, index] = apart[:, index] > 0
    total: npt.NDArray[np.float64] = apart.sum(axis=1)
    return total
