"""Synthetic jobs for the learner's benchmarks, drawn at random from a seed.

Each has a step time over five numeric and three categorical knobs. The logarithm of the step
time is a sum of valleys (one per numeric knob, some of whose places depend on a category), of costs per category and per pair of categories, and in half of the jobs of
a cliff where the cycle time gets long. The true optimum is known from an exhaustive search.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hvd_autosync.learner import Observation
from hvd_autosync.learner.points import FloatArray, distinct, spread
from hvd_autosync.learner.pool import one_knob_away
from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.search_space.knobs import categorical_knob, float_knob, integer_knob

#: Names as in Horovod; what they do here is invented.
SPACE = SearchSpace(
    (
        integer_knob(
            "fusion_threshold_bytes",
            0,
            1 << 28,
            1 << 27,
            help="",
            scale="log",
            log_offset=65536.0,
            multiple=65536,
        ),
        float_knob("cycle_time_ms", 0.1, 100.0, 1.0, help="", scale="log"),
        integer_knob("buckets", 0, 128, 0, help="", scale="log", log_offset=1.0),
        float_knob("share", 0.0, 1.0, 0.5, help=""),
        integer_knob("num_nccl_streams", 1, 4, 1, help=""),
        categorical_knob("hierarchical_allreduce", (False, True), False, help=""),
        categorical_knob("cache_capacity", (0, 1024, 4096), 1024, help=""),
        categorical_knob("compression", ("none", "fp16", "int8"), "none", help=""),
    )
)

_NUMERIC, _CATEGORICAL = 5, 3
_LAST_CHOICE = np.array([1, 2, 2])


class Landscape:
    """One synthetic job.

    Args:
        seed: Which job.
        noise: Relative standard deviation of a measured step time.
    """

    def __init__(self, seed: int, noise: float = 0.03) -> None:
        rng = np.random.default_rng([20240, seed])
        self._noise = noise
        self._seed = seed
        self._optimum = rng.random(_NUMERIC)
        self._depth = 0.7 * rng.dirichlet(np.full(_NUMERIC, 0.7))
        self._power = rng.choice([1, 2], _NUMERIC)
        self._shift = rng.normal(0, 0.3, (_NUMERIC, _CATEGORICAL))
        self._shift *= rng.random(self._shift.shape) < 0.2
        self._choice = 0.1 * rng.standard_normal((_CATEGORICAL, 3))
        pairs = rng.random((_CATEGORICAL, _CATEGORICAL, 1, 1)) < 0.4
        self._pair = 0.15 * rng.standard_normal((_CATEGORICAL, _CATEGORICAL, 3, 3)) * pairs
        self._cliff = 4.0 * (rng.random() < 0.5)
        self.best_log_step = float(self._search().min())

    def log_step(self, points: FloatArray) -> FloatArray:
        """True log step time (natural, of seconds) at snapped points, ``n x 8`` to ``(n,)``."""
        numbers, codes = points[:, :_NUMERIC], np.rint(points[:, _NUMERIC:] * _LAST_CHOICE)
        choice: npt.NDArray[np.intp] = codes.astype(np.intp)
        place = np.clip(self._optimum + (choice > 0) @ self._shift.T, 0, 1)
        value = -2 + (self._depth * (1.5 * np.abs(numbers - place)) ** self._power).sum(axis=1)
        for one in range(_CATEGORICAL):
            value += self._choice[one, choice[:, one]]
            for other in range(one):
                value += self._pair[one, other, choice[:, one], choice[:, other]]
        return value + self._cliff * np.clip(numbers[:, 1] - 0.75, 0, None)

    def regret(self, strategy: Strategy) -> float:
        """By how much ``strategy`` is slower than the best one: 0.05 is 5 %."""
        log_step = self.log_step(SPACE.encode(strategy)[np.newaxis])[0]
        return math.expm1(float(log_step) - self.best_log_step)

    def measure(self, strategy: Strategy, trial: int) -> Observation:
        """One noisy trial; the noise follows from the job and the trial's number."""
        noise = np.random.default_rng([self._seed, trial]).normal(0, self._noise)
        log_step = self.log_step(SPACE.encode(strategy)[np.newaxis])[0]
        return Observation(strategy, math.exp(log_step + noise))

    def _search(self) -> FloatArray:
        """Log step times after a random and a thorough local search."""
        points = spread(SPACE, np.random.default_rng(0).random((10_000, SPACE.dimension)))
        for _ in range(12):
            points = points[np.argsort(self.log_step(points))[:50]]
            neighbours = one_knob_away(SPACE, points, (0.2, 0.05, 0.01, 0.003))
            points = distinct(np.concatenate([points, neighbours]))
        return self.log_step(points)
