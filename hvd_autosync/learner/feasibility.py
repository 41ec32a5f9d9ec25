"""Where trials fail: the chance that one runs to its end.

A Gaussian process of 1 for each trial that was measured and 0 for each that failed, around what is
believed before any trial, with the covariance that the model of step times starts from: likenesses
of strategies, not their speeds, decide here. Its mean, cut to [0.01, 1], is the chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from linear_operator.utils.cholesky import psd_safe_cholesky

from hvd_autosync.learner.features import Features
from hvd_autosync.learner.kernel import MixedKernel
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import FloatArray, encode_all
from hvd_autosync.search_space import SearchSpace

#: Chance before any trial, and how certain one trial's end is of its strategy (a variance).
_BEFORE, _NOISE = 0.95, 0.05
#: Below this a chance is not told: the acquisition takes its logarithm.
_LEAST = 0.01


def feasibility(
    space: SearchSpace, observations: Sequence[Observation]
) -> Callable[[FloatArray], FloatArray]:
    """The chance that a trial at each of some points is measured: ``n x d`` to ``(n,)``.

    Raises:
        SpaceError: An observed strategy does not lie in ``space``.
    """
    ended = np.array([float(seen.measured) for seen in observations])
    if ended.all():
        return lambda points: np.ones(len(points))
    features = Features.of(space)
    kernel = MixedKernel(len(features.numeric), features.categorical_count)
    with isolated(), torch.no_grad():
        tried = features(encode_all(space, [seen.strategy for seen in observations]))
        covariance = kernel.forward(tried, tried)
        root = psd_safe_cholesky(covariance + _NOISE * torch.eye(len(tried)).to(tried))
        surprise = torch.from_numpy(ended - _BEFORE).unsqueeze(-1)
        weights = torch.cholesky_solve(surprise, root).squeeze(-1)

    def chance(points: FloatArray) -> FloatArray:
        with isolated(), torch.no_grad():
            mean = _BEFORE + kernel.forward(features(points), tried) @ weights
        return np.asarray(np.clip(mean.numpy(), _LEAST, 1.0))

    return chance
