"""The acquisition function: noisy expected improvement over a mixed space.

It is BoTorch's ``qLogNoisyExpectedImprovement``: the expected improvement over the best measured
strategy, where true step times are uncertain [Letham2019]_, in a logarithmic form that stays
informative if the improvement is tiny [Ament2023]_. Pending strategies count as tried, with
unknown results. The function is maximized over a pool of discretized candidates and then by local
search, knob by knob; categorical knobs are never relaxed to continuous values.

``n``: number of points; ``d``: dimension of the space.

.. [Letham2019] B. Letham et al., "Constrained Bayesian Optimization with Noisy Experiments",
   Bayesian Analysis 14(2), 2019.
.. [Ament2023] S. Ament et al., "Unexpected Improvements to Expected Improvement for Bayesian
   Optimization", NeurIPS 2023.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.sampling.normal import SobolQMCNormalSampler
from torch import Tensor

from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.points import BoolArray, FloatArray, distinct, keys
from hvd_autosync.learner.pool import candidate_pool, one_knob_away
from hvd_autosync.learner.surrogate import Surrogate

#: Logarithm of the factor on the expected improvement: from points, ``n x d``, and their expected
#: log step times, ``(n,)``, to ``(n,)``.
LogUtility = Callable[[FloatArray, FloatArray], FloatArray]
#: The score of points, ``n x d``, from them and the model's inputs there; larger is better.
Score = Callable[[FloatArray, Tensor], FloatArray]

_SAMPLES = 128
#: Score of a point whose improvement is 0 or cannot be computed; finite, because JSON needs it.
_LOWEST_SCORE = -1e9
#: Number of candidates of a pool to score: those with the best means, and others.
_BEST, _OTHERS = 512, 256
#: Points whose neighbours each round of local search scores, and the step lengths of the rounds.
_TOP = 5
_ROUNDS = ((0.1, 0.03), (0.03, 0.01), (0.01, 0.003))
#: Tried points around which candidates are drawn.
_CENTERS = 8


def propose(
    surrogate: Surrogate,
    tried: FloatArray,
    pending: FloatArray,
    seed: int,
    log_utility: LogUtility | None = None,
    incumbents: BoolArray | None = None,
) -> tuple[FloatArray, float] | None:
    """Return the point with the highest score that is neither tried nor pending.

    Args:
        surrogate: The fitted model.
        tried: Discretized points of all trials, at least one, shape ``n x d``.
        pending: Discretized points of running trials, shape ``m x d``.
        seed: Seed of samples and candidates.
        log_utility: Logarithm of the factor on the expected improvement; ``None``: 0 everywhere.
        incumbents: Mask of ``tried``, ``(n,)``: the points to improve on and to search around;
            all if it is ``None`` or selects none.

    Returns:
        The point, shape ``(d,)``, and its score: the logarithm of its expected improvement plus
        ``log_utility``. ``None`` if every candidate is tried or pending.
    """
    best_so_far = tried if incumbents is None or not incumbents.any() else tried[incumbents]
    tried, pending, best_so_far = distinct(tried), distinct(pending), distinct(best_so_far)
    baseline = surrogate.inputs(best_so_far)
    ranked = best_so_far[np.argsort(surrogate.mean_of(baseline), kind="stable")]
    pool, complete = candidate_pool(surrogate.space, ranked[:_CENTERS], seed)
    excluded = {*keys(tried), *keys(pending)}
    pool = distinct(pool, excluded)
    if len(pool) == 0:
        return None
    with isolated(seed), torch.no_grad():
        score = _score(surrogate, baseline, pending, seed, log_utility)
        inputs = surrogate.inputs(pool)
        if not complete:
            kept = _promising(surrogate.mean_of(inputs))
            pool, inputs = pool[kept], inputs[torch.from_numpy(kept)]
        scores = score(pool, inputs)
        if not complete:
            pool, scores = _local_search(surrogate, pool, scores, score, excluded)
    best = int(np.argmax(scores))
    return pool[best], float(scores[best])


def _promising(log_step: FloatArray) -> npt.NDArray[np.intp]:
    """Indices of the smallest values and of some others, evenly spaced by rank."""
    order = np.argsort(log_step, kind="stable")
    others = order[_BEST:]
    return np.concatenate([order[:_BEST], others[:: max(-(-len(others) // _OTHERS), 1)]])


def _score(
    surrogate: Surrogate,
    baseline: Tensor,
    pending: FloatArray,
    seed: int,
    log_utility: LogUtility | None,
) -> Score:
    """Build the score: the acquisition function over ``baseline`` plus ``log_utility``."""
    acquisition = qLogNoisyExpectedImprovement(
        surrogate.model,
        X_baseline=baseline,
        sampler=SobolQMCNormalSampler(torch.Size([_SAMPLES]), seed=seed),
        X_pending=surrogate.inputs(pending) if len(pending) else None,
        prune_baseline=True,
    )

    def score(points: FloatArray, inputs: Tensor) -> FloatArray:
        values: FloatArray = acquisition(inputs.unsqueeze(-2)).numpy()
        values = np.nan_to_num(
            values, nan=_LOWEST_SCORE, neginf=_LOWEST_SCORE, posinf=_LOWEST_SCORE
        )
        return (
            values
            if log_utility is None
            else values + log_utility(points, surrogate.mean_of(inputs))
        )

    return score


def _local_search(
    surrogate: Surrogate, pool: FloatArray, scores: FloatArray, score: Score, excluded: set[bytes]
) -> tuple[FloatArray, FloatArray]:
    """Search the neighbours of the pool's best points in a few rounds; return points and scores."""
    seen = excluded | set(keys(pool))
    for steps in _ROUNDS:
        order = np.argsort(-scores, kind="stable")[:_TOP]
        pool, scores = pool[order], scores[order]
        neighbours = distinct(one_knob_away(surrogate.space, pool, steps), seen)
        if len(neighbours) == 0:
            break
        seen.update(keys(neighbours))
        pool = np.concatenate([pool, neighbours])
        scores = np.concatenate([scores, score(neighbours, surrogate.inputs(neighbours))])
    return pool, scores
