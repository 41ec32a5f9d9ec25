"""Whether going on promises anything: the chance that a faster strategy is still out there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvd_autosync.learner.gp import Surrogate, fit
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import distinct, encode_all
from hvd_autosync.learner.pool import candidate_pool
from hvd_autosync.search_space import SearchSpace

_SAMPLES = 512
#: Tried points around which candidates are drawn.
_CENTERS = 8


def chance_of_gain(
    space: SearchSpace,
    observations: Sequence[Observation],
    *,
    gain: float = 0.02,
    seed: int,
    surrogate: Surrogate | None = None,
) -> float:
    """Probability that some strategy is more than ``gain`` faster than the present best.

    The present best is the measured strategy with the lowest posterior mean. The probability is
    that of the model: the share of joint posterior samples, over candidates everywhere and around
    the best, in which one of them beats it.

    Args:
        space: The space.
        observations: All that was learned so far.
        gain: Share of the best's step time, between 0 and 1.
        seed: Of candidates and samples.
        surrogate: The model fitted to these observations, where the caller has it.

    Returns:
        A probability; 1 as long as nothing was measured.
    """
    measured = [seen.strategy for seen in observations if seen.measured]
    if not measured:
        return 1.0
    surrogate = surrogate or fit(space, observations)
    tried = distinct(encode_all(space, measured))
    best = tried[np.argsort(surrogate.joint_at(tried)[0], kind="stable")][:_CENTERS]
    pool, _ = candidate_pool(space, best, seed)
    # The incumbent comes first and its repetition in the pool is dropped.
    points = distinct(np.concatenate([best[:1], pool]))
    log_step = surrogate.sample_at(points, _SAMPLES, seed)
    fastest = log_step.min(axis=1)
    return float(np.mean(fastest < log_step[:, 0] + math.log1p(-gain)))
