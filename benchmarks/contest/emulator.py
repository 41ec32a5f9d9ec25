"""A measured table as a job that answers for every strategy of its space.

Between the measured strategies a Gaussian process interpolates, with a length scale for each number
and each choice and a noise of its own; it has no idea of costs. On strategies that it was not shown
its error is 0.9 to 1.6 times what repeated measurements differ by, on one table 2.5 times; that of
a forest of extremely randomized trees was up to 6 times (``benchmarks/README.md``).
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from sklearn.model_selection import KFold, cross_val_predict

from hvd_autosync.learner import Observation
from hvd_autosync.learner.points import FloatArray, encode_all
from hvd_autosync.search_space import CategoricalKnob, SearchSpace, Strategy, Task
from hvd_autosync.search_space.conditions import active
from hvd_autosync.study.related_studies import observations_of
from hvd_autosync.traces import TraceStore, import_studies

# The length scale of a knob that does not matter comes to its bound.
warnings.filterwarnings("ignore", category=ConvergenceWarning)

#: Seconds of a trial beside its steps, and its steps.
_OVERHEAD_S, _STEPS = 1.0, 25
_FOLDS = 10


@dataclass(frozen=True)
class Quality:
    """How well an emulator predicts measured strategies that it was not shown.

    Attributes:
        strategies: How many were measured.
        error: Root mean square of the logarithm's error.
        concordance: Share of pairs of strategies that it ranks as they were measured.
        noise: Standard deviation of the logarithm of repeated measurements.
    """

    strategies: int
    error: float
    concordance: float
    noise: float


class Emulator:
    """One table.

    Args:
        path: A trace file with one study.
    """

    def __init__(self, path: Path) -> None:
        store = TraceStore("sqlite://")
        (study_id,) = import_studies(store, path)
        study, trials = store.study(study_id), store.trials(study_id)
        assert study.space is not None and study.task is not None, "a survey has described both"
        self.name = path.name.partition(".")[0]
        self.space: SearchSpace = study.space
        self.task: Task = study.task
        self.study_id = study_id
        self.observations = [o for o in observations_of(self.space, trials) if o.measured]
        repeated = defaultdict(list)
        for seen in self.observations:
            repeated[seen.strategy].append(seen.log_step)
        self._points = encode_all(self.space, repeated)
        self._log_step = np.array([np.median(values) for values in repeated.values()])
        several = [values for values in repeated.values() if len(values) > 1]
        freedom = sum(len(values) - 1 for values in several)
        squares = sum(float(((np.array(v) - np.mean(v)) ** 2).sum()) for v in several)
        self.noise = math.sqrt(squares / freedom) if freedom else 0.0
        inputs = self._inputs(self._points)
        self._process = _new_process(inputs.shape[1])
        self._process.fit(inputs, self._log_step)
        self.best_log_step = float(self.log_step(self._points).min())

    def small_study(self, trials: int, seed: int = 0) -> tuple[Observation, ...]:
        """What a study of so many trials may have seen: the default, spread points, good ones.

        Args:
            trials: How many.
            seed: Others for each.
        """
        default = [o for o in self.observations if o.strategy == self.space.default][:1]
        others = [o for o in self.observations if o.strategy != self.space.default]
        rng = np.random.default_rng([len(others), seed])
        good = sorted(others, key=lambda o: o.log_step)[: len(others) // 3]
        half = (trials - 1) // 2
        picked = []
        for some, count in ((others, half), (good, trials - 1 - half)):
            chosen = rng.choice(len(some), min(count, len(some)), replace=False)
            picked += [some[int(index)] for index in chosen]
        return (*default, *picked)

    def measured(self) -> tuple[list[Strategy], FloatArray]:
        """The strategies, and the median log step time of each, shape ``(n,)``."""
        return [self.space.decode(point) for point in self._points], self._log_step

    def _inputs(self, points: FloatArray) -> FloatArray:
        """Numbers, one column per choice, and whether conditional knobs are on."""
        on = active(self.space, points)
        columns = []
        for index, knob in enumerate(self.space.knobs):
            column = points[:, index]
            if isinstance(knob, CategoricalKnob):
                for choice in knob.choices:
                    columns.append((column == knob.to_unit(choice)) & on[:, index])
            else:
                columns.append(column)
                columns.append(on[:, index])
        return np.stack(columns, axis=1).astype(np.float64)

    def log_step(self, points: FloatArray) -> FloatArray:
        """Logarithm of the step time at points, ``n x d``: shape ``(n,)``."""
        predicted: FloatArray = self._process.predict(self._inputs(points))
        return predicted

    def regret(self, strategy: Strategy) -> float:
        """By how much ``strategy`` is slower than the best of those that were run: 0.05 is 5 %."""
        log_step = float(self.log_step(encode_all(self.space, [strategy]))[0])
        return math.expm1(max(log_step - self.best_log_step, 0.0))

    def measure(self, strategy: Strategy, seed: int, trial: int) -> Observation:
        """One noisy trial; the noise follows from the seed and the trial's number."""
        noise = np.random.default_rng([seed, trial, 7]).normal(0, self.noise)
        log_step = float(self.log_step(encode_all(self.space, [strategy]))[0])
        return Observation(self.space.complete(strategy), math.exp(log_step + noise))

    def trial_s(self, observation: Observation) -> float:
        """Seconds that such a trial would have taken."""
        return _OVERHEAD_S + _STEPS * (observation.step_s or 0.0)

    def quality(self) -> Quality:
        """By cross-validation over the measured strategies."""
        folds = KFold(_FOLDS, shuffle=True, random_state=0)
        inputs = self._inputs(self._points)
        process = _new_process(inputs.shape[1])
        predicted = cross_val_predict(process, inputs, self._log_step, cv=folds)
        error = float(np.sqrt(((predicted - self._log_step) ** 2).mean()))
        right = concordance(predicted, self._log_step)
        return Quality(len(self._log_step), error, right, self.noise)


def _new_process(inputs: int) -> GaussianProcessRegressor:
    kernel = ConstantKernel() * Matern(np.ones(inputs), (0.1, 50.0), nu=2.5)
    noise = WhiteKernel(0.05, (1e-4, 1.0))
    return GaussianProcessRegressor(kernel + noise, normalize_y=True, random_state=0)


def concordance(predicted: FloatArray, measured: FloatArray) -> float:
    """Share of pairs whose order is predicted, AutoSync's metric of a cost model.

    A pair that is predicted to be equal counts half.
    """
    upper = np.triu_indices(len(measured), 1)
    differs = np.subtract.outer(measured, measured)[upper]
    guessed = np.subtract.outer(predicted, predicted)[upper]
    agrees = 0.5 + 0.5 * np.sign(differs * guessed)
    return float(np.mean(agrees[differs != 0]))
