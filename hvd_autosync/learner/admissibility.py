"""How likely a lossy strategy may be used, from what was said of others like it.

A Gaussian process over the lossy knobs, beside that of the step time, models by how much the loss
of a strategy is above the default's, in units of what is allowed. A study judges a handful of
strategies, so nothing of it is fitted: one refused for its loss makes its neighbours doubtful, and
all others a little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import norm

from hvd_autosync.learner.points import FloatArray, active, encode_all
from hvd_autosync.search_space import CategoricalKnob, SearchSpace, Strategy

#: Mean and deviations of the excess before anything is known: of all strategies together (how much
#: this training bears), of each by itself, and of a judgement.
_MEAN, _TOGETHER, _ALONE, _NOISE = 0.3, 0.7, 1.2, 0.4
#: Over so much of a knob's range strategies stay alike, and so much less with each other choice.
_SCALE, _RATE = 0.4, 0.7
#: A larger excess says no more.
_LEAST, _MOST = -2.0, 6.0


class Admissibility:
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
        self._judged = self._rows(encode_all(space, judged))
        values = np.clip(np.array(excess, dtype=np.float64), _LEAST, _MOST) - _MEAN
        covariance = self._covariance(self._judged, self._judged)
        self._inverse = np.linalg.inv(covariance + _NOISE**2 * np.eye(len(values)))
        self._weights = self._inverse @ values

    def chances(self, strategies: Sequence[Strategy]) -> FloatArray:
        """The chance that each of ``strategies`` may be used, shape ``(m,)``."""
        return self.at(encode_all(self._space, strategies))

    def at(self, points: FloatArray) -> FloatArray:
        """The same of snapped points, ``m x d``; exact strategies surely may."""
        exact = (points == self._space.encode(self._space.default))[:, self._lossy].all(axis=1)
        return np.where(exact, 1.0, self._lossy_chances(points))

    def _lossy_chances(self, points: FloatArray) -> FloatArray:
        shared = self._covariance(self._rows(points), self._judged)
        mean = _MEAN + shared @ self._weights
        explained = np.einsum("ij,jk,ik->i", shared, self._inverse, shared)
        deviation = np.sqrt(np.maximum(_TOGETHER**2 + _ALONE**2 - explained, 1e-12))
        chances: FloatArray = norm.cdf((1.0 - mean) / deviation)
        return chances

    def _rows(self, points: FloatArray) -> FloatArray:
        """Lossy knobs' positions; those without effect are NaN. Shape ``n x l``."""
        return np.where(active(self._space, points), points, math.nan)[:, self._lossy]

    def _covariance(self, first: FloatArray, second: FloatArray) -> FloatArray:
        """Shape ``n x m``."""
        distance = np.zeros((len(first), len(second)))
        for column, index in enumerate(self._lossy):
            apart = np.subtract.outer(first[:, column], second[:, column])
            if isinstance(self._space.knobs[index], CategoricalKnob):
                distance += _RATE * (np.nan_to_num(apart) != 0)
            else:  # with another choice above it, a knob has nothing to be compared with
                distance += 0.5 * (np.nan_to_num(apart) / _SCALE) ** 2
        covariance: FloatArray = _TOGETHER**2 + _ALONE**2 * np.exp(-distance)
        return covariance
