"""The quality constraint: the probability that a lossy strategy may be used.

A Gaussian process over the lossy knobs, separate from that of the step time, models the violation
of a strategy: its loss minus the default's, in units of the allowed difference::

    violation(x) = a h(x) + r(x),    a ~ N(1, 0.6^2),    r ~ GP(0, s(x) s(x') k(x, x'))

h is the expected harshness of its knobs (:mod:`hvd_autosync.learner.harshness`), a the sensitivity
of this training, and r the residual of similar strategies, whose deviation s grows with h. A study
judges only a handful of strategies, so no hyperparameter is fitted. A refused strategy lowers
the probability of harsher ones, most of all of its neighbours; an admitted one raises it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import norm

from hvd_autosync.learner.conditioning import Conditioning
from hvd_autosync.learner.harshness import MOST, harshness
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.points import FloatArray, encode_all
from hvd_autosync.search_space import CategoricalKnob, SearchSpace, Strategy

#: Prior standard deviations: of a; of r where h is 0, and its increase per unit of h; of the noise
#: of a verdict.
_SENSITIVITY, _RESIDUAL, _PER_HARSHNESS, _NOISE = 0.6, 0.4, 0.3, 0.4
#: Length scale of a numeric knob as a share of its range, and rate of a categorical knob.
_SCALE, _RATE = 0.4, 0.7
#: Violations are clipped to this and to :data:`hvd_autosync.learner.harshness.MOST`: others carry
#: no more information.
_LEAST = -2.0


class QualityConstraint:
    """The posterior of the violation, given the verdicts so far.

    Args:
        space: The space of the strategies.
        judged: Strategies that have a verdict.
        violation: Their losses minus the default's over the allowed difference, shape ``(n,)``:
            above 1 is refused; infinite if a training failed.
        refused: Strategies that may not be used, whatever the verdicts; those outside of the space
            are ignored.
        closed: Whether no further strategy is judged, so that only admitted ones may be used.
        shared: Whether verdicts hold for all strategies with the same lossy part.

    Raises:
        SpaceError: A judged strategy does not lie in the space.
    """

    def __init__(
        self,
        space: SearchSpace,
        judged: Sequence[Strategy],
        violation: Sequence[float],
        *,
        refused: Collection[Strategy] = (),
        closed: bool = False,
        shared: bool = True,
    ) -> None:
        self._space = space
        self._lossy = [index for index, knob in enumerate(space.knobs) if not knob.exact]
        self._judged = self._features(encode_all(space, judged))
        verdicts = list(zip(judged, violation, strict=True))
        self._admitted = [strategy for strategy, excess in verdicts if excess <= 1.0]
        self._worse = [strategy for strategy, excess in verdicts if excess > 1.0]
        self._refused = [strategy for strategy in refused if space.holds(strategy)]
        self._closed = closed
        self._shared = shared
        values = np.clip(np.array(violation, dtype=np.float64), _LEAST, MOST) - self._judged[:, -1]
        covariance = self._covariance(self._judged, self._judged) + _NOISE**2 * np.eye(len(values))
        with isolated():
            self._residual = Conditioning(torch.from_numpy(covariance), torch.from_numpy(values))

    def feasibility_probabilities(self, strategies: Sequence[Strategy]) -> FloatArray:
        """Return the probability that each strategy is admitted, shape ``(m,)``."""
        return self.at(encode_all(self._space, strategies))

    def at(self, points: FloatArray) -> FloatArray:
        """Return it for discretized points, ``m x d``; for exact strategies it is 1."""
        exact = (points == self._space.encode(self._space.default))[:, self._lossy].all(axis=1)
        lossy = np.zeros(len(points)) if self._closed else self._lossy_probabilities(points)
        # A verdict is final: what trains alike is not judged again.
        lossy[self._alike(points, self._admitted, self._shared)] = 1.0
        lossy[self._alike(points, self._worse, self._shared)] = 0.0
        lossy[self._alike(points, self._refused)] = 0.0
        return np.where(exact, 1.0, lossy)

    def _alike(
        self, points: FloatArray, others: Sequence[Strategy], lossy_part: bool = True
    ) -> npt.NDArray[np.bool_]:
        """Return whether a point is one of ``others``, or has its lossy part, shape ``(n,)``."""
        space = self._space
        found = np.zeros(len(points), dtype=np.bool_)
        for other, row in zip(others, encode_all(space, others), strict=True):
            part = space.lossy_part(other) if lossy_part else space.complete(other)
            columns = [index for index, knob in enumerate(space.knobs) if knob.name in part]
            # A knob that is switched off stands at its default in both.
            found |= (points[:, columns] == row[columns]).all(axis=1)
        return found

    def _lossy_probabilities(self, points: FloatArray) -> FloatArray:
        features = self._features(points)
        shared = torch.from_numpy(self._covariance(features, self._judged))
        expected = features[:, -1]
        prior = (_SENSITIVITY * expected) ** 2 + _spread(expected) ** 2
        with isolated():
            mean = expected + self._residual.mean(shared).numpy()
            variance = self._residual.variance(torch.from_numpy(prior), shared).numpy()
        deviation = np.sqrt(np.maximum(variance, 1e-12))
        probabilities: FloatArray = norm.cdf((1.0 - mean) / deviation)
        return probabilities

    def _features(self, points: FloatArray) -> FloatArray:
        """Positions of the ``l`` lossy knobs, and h; ``n x (l + 1)``.

        A knob that is switched off stands at its default, as in ``SearchSpace.lossy_part``, so that
        strategies that train alike are the same to the model.
        """
        return np.column_stack([points[:, self._lossy], harshness(self._space, points)])

    def _covariance(self, first: FloatArray, second: FloatArray) -> FloatArray:
        """Prior covariance of the violation, shape ``n x m``."""
        distance = np.zeros((len(first), len(second)))
        for column, index in enumerate(self._lossy):
            apart = np.subtract.outer(first[:, column], second[:, column])
            if isinstance(self._space.knobs[index], CategoricalKnob):
                distance += _RATE * (apart != 0)
            else:
                distance += 0.5 * (apart / _SCALE) ** 2
        here, there = first[:, -1], second[:, -1]
        covariance: FloatArray = _SENSITIVITY**2 * np.outer(here, there)
        covariance += np.outer(_spread(here), _spread(there)) * np.exp(-distance)
        return covariance


def _spread(expected: FloatArray) -> FloatArray:
    """Prior standard deviation of r, s in the module."""
    return _RESIDUAL + _PER_HARSHNESS * expected
