"""Whether going on promises anything: the chance that a faster strategy is still out there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvd_autosync.learner.feasibility import feasibility
from hvd_autosync.learner.gp import Surrogate, fit
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import distinct, encode_all
from hvd_autosync.learner.pool import candidate_pool
from hvd_autosync.learner.problem import Problem

_SAMPLES = 512
#: Tried points around which candidates are drawn.
_CENTERS = 8
#: Candidates that fail more surely are no hope.
_FEASIBLE = 0.5


def chance_of_gain(
    problem: Problem,
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
        problem: The space, and what is known of it.
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
    surrogate = surrogate or fit(problem, observations)
    tried = distinct(encode_all(problem.space, measured))
    best = tried[np.argsort(surrogate.mean_at(tried), kind="stable")][:_CENTERS]
    pool, _ = candidate_pool(
        problem.space, best, seed, surrogate.mean_at if surrogate.experts else None
    )
    pool = pool[feasibility(problem.space, observations)(pool) >= _FEASIBLE]
    # The incumbent comes first and its repetition in the pool is dropped.
    points = distinct(np.concatenate([best[:1], pool]))
    log_step = surrogate.sample_at(points, _SAMPLES, seed)
    fastest = log_step.min(axis=1)
    return float(np.mean(fastest < log_step[:, 0] + math.log1p(-gain)))
