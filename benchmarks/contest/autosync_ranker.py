"""AutoSync's linear ranker, the baseline of a cost model that learns.

Twelve features of a strategy: the greatest and the sum, over the owners of parameters and over the
groups that are reduced together, of the transmission time, the number of receivers and the largest
group of them on one host; weights from pairs of measured strategies, by which of the two was faster
(Zhang et al., "AutoSync", NeurIPS 2020, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from sklearn.linear_model import LogisticRegression

from hvd_autosync.cost import CostModel
from hvd_autosync.cost.columns import Columns
from hvd_autosync.learner.points import FloatArray
from hvd_autosync.search_space import Task, Value


class LinearRanker:
    """A ranker of one task.

    Args:
        task: What is ranked for.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._cost = CostModel(task.model, task.resources)
        self._mean = self._deviation = np.empty(0)
        self._weights = np.zeros(12)

    def fit(self, strategies: Sequence[Mapping[str, Value]], log_step: FloatArray) -> None:
        """Learn weights from measured strategies, shape ``(n,)``."""
        features = self._features(strategies)
        self._mean, self._deviation = features.mean(axis=0), features.std(axis=0) + 1e-12
        scaled = (features - self._mean) / self._deviation
        first, second = np.triu_indices(len(log_step), 1)
        differences = scaled[first] - scaled[second]
        slower = log_step[first] > log_step[second]
        if slower.all() or not slower.any():
            return
        ranker = LogisticRegression(fit_intercept=False, C=1.0, max_iter=1000)
        ranker.fit(np.concatenate([differences, -differences]), np.concatenate([slower, ~slower]))
        self._weights = ranker.coef_[0]

    def score(self, strategies: Sequence[Mapping[str, Value]]) -> FloatArray:
        """Larger is slower, shape ``(n,)``."""
        scaled = (self._features(strategies) - self._mean) / self._deviation
        scores: FloatArray = scaled @ self._weights
        return scores

    def _features(self, strategies: Sequence[Mapping[str, Value]]) -> FloatArray:
        """The twelve features, shape ``n x 12``."""
        items = self._cost.prepare(Columns.of(strategies)).items
        assert items is not None, "tables are of several ranks"
        resources = self._task.resources
        receivers = resources.world_size - 1
        local = max(host.slots for host in resources.hosts)
        there, owned = items.size_bytes > 0, items.alone > 0
        columns = []
        for chosen in (there & owned, there & ~owned):
            time = np.where(chosen, items.wire_s, 0.0)
            columns += [time.max(axis=0), time.sum(axis=0)]
            count, some = chosen.sum(axis=0), chosen.any(axis=0)
            columns += [some * receivers, count * receivers, some * local, count * local]
        return np.stack(columns, axis=1).astype(np.float64)
