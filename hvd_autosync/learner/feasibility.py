"""Where trials fail: the probability that a trial is measured.

A Gaussian process regression on 1 for each measured trial and 0 for each failed one, with a
constant prior mean. Its covariance is that of the step time model before its fit: only the
similarity of strategies matters here, not their speed. The probability is the posterior mean,
clipped to [0.01, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hvd_autosync.learner.conditioning import Conditioning
from hvd_autosync.learner.features import Features
from hvd_autosync.learner.kernel import MixedKernel
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import FloatArray, encode_all
from hvd_autosync.search_space import SearchSpace

#: Prior probability, and noise variance of one trial's outcome.
_PRIOR, _NOISE = 0.95, 0.05
#: Lower bound of the probability: the acquisition takes its logarithm.
_LEAST = 0.01


def feasibility(
    space: SearchSpace, observations: Sequence[Observation]
) -> Callable[[FloatArray], FloatArray]:
    """Return a function from points, ``n x d``, to the probability of a measurement, ``(n,)``.

    Raises:
        SpaceError: An observed strategy does not lie in ``space``.
    """
    measured = np.array([float(seen.measured) for seen in observations])
    if measured.all():
        return lambda points: np.ones(len(points))
    features = Features.of(space)
    with isolated(), torch.no_grad():
        kernel = MixedKernel(len(features.numeric), features.categorical_count)
        tried = features(encode_all(space, [seen.strategy for seen in observations]))
        covariance = kernel.forward(tried, tried) + _NOISE * torch.eye(len(tried)).to(tried)
        process = Conditioning(covariance, torch.from_numpy(measured - _PRIOR))

    def probability(points: FloatArray) -> FloatArray:
        with isolated(), torch.no_grad():
            mean = _PRIOR + process.mean(kernel.forward(features(points), tried))
        return np.asarray(np.clip(mean.numpy(), _LEAST, 1.0))

    return probability
