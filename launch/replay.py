"""A trial runner that replays recorded trials and starts no job."""

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
    """Returns for each trial the recorded result of the same strategy, or of the nearest one.

    Repeated measurements of a strategy are returned in turn.

    Args:
        study: A study with a recorded space.
        trials: The study's trials; at least one has a result.

    Attributes:
        distance: Distance between the requested strategy and the last returned one, as of
            :func:`distances`; 0: they are equal.

    Raises:
        StudyError: The study has no space or no trial with a result.
    """

    def __init__(self, study: StudyRecord, trials: Sequence[TrialRecord]) -> None:
        results: dict[Strategy, list[TrialResult]] = defaultdict(list)
        for trial in trials:
            if study.space is None or study.space.excludes(trial.strategy):
                continue
            if trial.result is not None:
                results[study.space.complete(trial.strategy)].append(trial.result)
        if study.space is None or not results:
            raise StudyError(
                f"study {study.study_id} has no trials to replay",
                hint="Choose another study; hvd-autosync traces list shows all.",
            )
        self._space: SearchSpace = study.space
        self._recorded = dict(results)
        self._returned: dict[Strategy, int] = defaultdict(int)
        self._points = np.array([self._space.encode(strategy) for strategy in results])
        self.distance = 0.0

    def run(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """Return the recorded result; see :class:`hvd_autosync.launch.runner.TrialRunner`."""
        wanted = self._space.complete(spec.strategy)
        distance = distances(self._space, self._points, self._space.encode(wanted))
        nearest = int(distance.argmin())
        self.distance = float(distance[nearest])
        strategy = list(self._recorded)[nearest]
        results = self._recorded[strategy]
        result = results[self._returned[strategy] % len(results)]
        self._returned[strategy] += 1
        return result

    def close(self) -> None:
        """Do nothing: no process or file is open."""


def distances(
    space: SearchSpace, points: npt.NDArray[np.float64], point: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the distance of each of ``points``, ``n x d``, from ``point``, shape ``(n,)``.

    Each differing choice counts 1, each number its difference as a share of the knob's range.
    """
    distance = np.abs(points - point)
    for index, knob in enumerate(space.knobs):
        if isinstance(knob, CategoricalKnob):
            distance[:, index] = distance[:, index] > 0
    total: npt.NDArray[np.float64] = distance.sum(axis=1)
    return total
