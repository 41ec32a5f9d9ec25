"""Which strategy to try next: expected improvement over noisy observations, mixed space.

The acquisition function is BoTorch's ``qLogNoisyExpectedImprovement``: the expected improvement
over the best of the measured strategies, whose true step times are uncertain too [Letham2019]_, in
a logarithmic form that stays informative where the improvement is tiny [Ament2023]_. Strategies
that are being tried count as tried, with nothing known yet. It is maximized over a pool of
snapped candidates and then by local search, knob by knob; no category is ever relaxed.

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

#: What an improvement counts, as a logarithm: of points, ``n x d``, and their expected log step
#: times, ``(n,)``, to ``(n,)``.
LogUtility = Callable[[FloatArray, FloatArray], FloatArray]
#: The whole score of points, ``n x d``, with the model's inputs there: larger is better.
Score = Callable[[FloatArray, Tensor], FloatArray]

_SAMPLES = 128
#: Score of a point whose improvement is 0 or cannot be computed; a number, for JSON.
_HOPELESS = -1e9
#: Of a pool, so many of the candidates with the best means are scored, and of the others.
_BEST, _OTHERS = 512, 256
#: Points whose neighbours are looked at in each round of local search, and the rounds' steps.
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
    """The most promising point that is neither tried nor pending.

    Args:
        surrogate: The fitted model.
        tried: Snapped points of all trials, at least one, shape ``n x d``.
        pending: Snapped points that are being tried, shape ``m x d``.
        seed: Of samples and candidates.
        worth: What an improvement counts; the same everywhere if ``None``.
        rivals: Which of ``tried`` are to be improved on, and searched around, ``(n,)``; all if
            ``None`` or none.

    Returns:
        The point, shape ``(d,)``, and the logarithm of its expected improvement with that added;
        ``None`` when every candidate is tried or pending.
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
    """The places of the smallest values and of some others, evenly from all."""
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
    """The acquisition function over the best at some inputs of the model."""
    acquisition = qLogNoisyExpectedImprovement(
        surrogate.model,
        X_baseline=baseline,
        sampler=SobolQMCNormalSampler(torch.Size([_SAMPLES]), seed=seed),
        X_pending=surrogate.inputs(pending) if len(pending) else None,
        prune_baseline=True,
    )

    def score(points: FloatArray, inputs: Tensor) -> FloatArray:
        values: FloatArray = acquisition(inputs.unsqueeze(-2)).numpy()
        values = np.nan_to_num(values, nan=_HOPELESS, neginf=_HOPELESS, posinf=_HOPELESS)
        return (
            values
            if log_utility is None
            else values + log_utility(points, surrogate.mean_of(inputs))
        )

    return score


def _local_search(
    surrogate: Surrogate, pool: FloatArray, scores: FloatArray, score: Score, excluded: set[bytes]
) -> tuple[FloatArray, FloatArray]:
    """The pool's best points and their scores after a few rounds among their neighbours."""
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
