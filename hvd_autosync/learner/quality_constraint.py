"""How likely a lossy strategy may be used, from what was said of others like it.

A Gaussian process over the lossy knobs, beside that of the step time, models by how much the loss
of a strategy is above the default's, in units of what is allowed::

    excess(x) = a h(x) + r(x),    a ~ N(1, 0.6^2),    r ~ GP(0, s(x) s(x') k(x, x'))

with h what its knobs are expected to add (:mod:`hvd_autosync.learner.harshness`), a how little this
training bears, and r what the strategy and those like it do otherwise, more where h is large. A
study judges a handful of strategies, so nothing of it is fitted. One that is refused for its loss
makes harsher ones improbable, its neighbours most of all; one that is admitted lets others hope.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import norm

from hvd_autosync.learner.harshness import MOST, harshness
from hvd_autosync.learner.points import FloatArray, active, encode_all
from hvd_autosync.search_space import CategoricalKnob, SearchSpace, Strategy

#: Deviations before anything is known: of a; of r, and by how much more for each unit of h; and of
#: a judgement.
_BEARS, _ALONE, _HARSHER, _NOISE = 0.6, 0.4, 0.3, 0.4
#: Over so much of a knob's range strategies stay alike, and so much less with each other choice.
_SCALE, _RATE = 0.4, 0.7
#: A smaller excess says no more, nor does a larger one than :data:`.harshness.MOST`.
_LEAST = -2.0


class QualityConstraint:
    """What is known of losses.

    Args:
        space: The space of the strategies.
        judged: Strategies whose losses were seen.
        excess: Their losses above the default's over what is allowed, shape ``(n,)``: above 1 is
            too much; infinite where a training failed.

    Raises:
        SpaceError: A strategy does not lie in the space.
    """

    def __init__(
        self, space: SearchSpace, judged: Sequence[Strategy], excess: Sequence[float]
    ) -> None:
        self._space = space
        self._lossy = [index for index, knob in enumerate(space.knobs) if not knob.exact]
        self._judged = self._features(encode_all(space, judged))
        values = np.clip(np.array(excess, dtype=np.float64), _LEAST, MOST) - self._judged[:, -1]
        covariance = self._covariance(self._judged, self._judged)
        self._inverse = np.linalg.inv(covariance + _NOISE**2 * np.eye(len(values)))
        self._weights = self._inverse @ values

    def feasibility_probabilities(self, strategies: Sequence[Strategy]) -> FloatArray:
        """The chance that each of ``strategies`` may be used, shape ``(m,)``."""
        return self.at(encode_all(self._space, strategies))

    def at(self, points: FloatArray) -> FloatArray:
        """The same of snapped points, ``m x d``; exact strategies surely may."""
        exact = (points == self._space.encode(self._space.default))[:, self._lossy].all(axis=1)
        return np.where(exact, 1.0, self._lossy_chances(points))

    def _lossy_chances(self, points: FloatArray) -> FloatArray:
        features = self._features(points)
        shared = self._covariance(features, self._judged)
        expected = features[:, -1]
        mean = expected + shared @ self._weights
        explained = np.einsum("ij,jk,ik->i", shared, self._inverse, shared)
        prior = (_BEARS * expected) ** 2 + _spread(expected) ** 2
        deviation = np.sqrt(np.maximum(prior - explained, 1e-12))
        feasibility_probabilities: FloatArray = norm.cdf((1.0 - mean) / deviation)
        return feasibility_probabilities

    def _features(self, points: FloatArray) -> FloatArray:
        """Lossy knobs' positions, NaN for those without effect, and h. Shape ``n x (l + 1)``."""
        rows = np.where(active(self._space, points), points, math.nan)[:, self._lossy]
        return np.column_stack([rows, harshness(self._space, points)])

    def _covariance(self, first: FloatArray, second: FloatArray) -> FloatArray:
        """Shape ``n x m``."""
        distance = np.zeros((len(first), len(second)))
        for column, index in enumerate(self._lossy):
            apart = np.subtract.outer(first[:, column], second[:, column])
            if isinstance(self._space.knobs[index], CategoricalKnob):
                distance += _RATE * (np.nan_to_num(apart) != 0)
            else:  # with another choice above it, a knob has nothing to be compared with
                distance += 0.5 * (np.nan_to_num(apart) / _SCALE) ** 2
        here, there = first[:, -1], second[:, -1]
        covariance: FloatArray = _BEARS**2 * np.outer(here, there)
        covariance += np.outer(_spread(here), _spread(there)) * np.exp(-distance)
        return covariance


def _spread(expected: FloatArray) -> FloatArray:
    """Deviation of r."""
    return _ALONE + _HARSHER * expected
