"""The acquisition function: noisy expected improvement per second of a trial that can be used.

The improvement is that of BoTorch's ``qLogNoisyExpectedImprovement``: over the best measured
strategy, where true step times are uncertain [Letham2019]_, in a logarithmic form that stays
informative if the improvement is tiny [Ament2023]_. Pending strategies count as tried, with
unknown results. The function is maximized over a pool of discretized candidates and then by local
search, knob by knob; categorical knobs are never relaxed to continuous values.

Every candidate is judged jointly with the same few points: the incumbents and those pending. So
their posterior is computed once per set of candidates (:class:`FinitePosterior`), not once per
candidate as BoTorch would do with the model itself. The values are the same.

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
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.acquisition.objective import LinearMCObjective
from botorch.models.gpytorch import GPyTorchModel
from botorch.models.model import Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.utils.transforms import t_batch_mode_transform
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.points import BoolArray, FloatArray, distinct, keys
from hvd_autosync.learner.pool import candidate_pool, one_knob_away
from hvd_autosync.learner.surrogate import Surrogate
from hvd_autosync.learner.untried import preferred

#: Logarithm of the factor on the expected improvement: from points, ``n x d``, and their expected
#: log step times, ``(n,)``, to ``(n,)``.
LogUtility = Callable[[FloatArray, FloatArray], FloatArray]
#: From points, ``n x d``, to whether each is kept, ``(n,)``.
Mask = Callable[[FloatArray], BoolArray]

_SAMPLES = 128
#: Score of a point whose improvement is 0 or cannot be computed; finite, because JSON needs it.
_LOWEST_SCORE = -1e9
#: Number of candidates of a pool to score: those with the best means, and others.
_BEST, _OTHERS = 512, 256
#: Points whose neighbours each round of local search scores, and the step lengths of the rounds.
_TOP = 5
_ROUNDS = ((0.1, 0.03), (0.03, 0.01), (0.01, 0.003))
#: Tried points around which candidates are drawn, and most of those to improve on: where little
#: matters pruning keeps nearly all, and a proposal takes seconds and gigabytes.
_CENTERS, _MOST_BASELINE = 8, 40


class LogExpectedUtility(AcquisitionFunction):
    """log E[improvement] plus the logarithm of what an improvement is worth.

    Args:
        model: Predicts log step times at ``X``, of which the smallest is the best.
        baseline: The points to improve on, ``n x d``.
        pending: The points of running trials, ``m x d``.
        log_worth: From ``X``, ``b x 1 x d``, to the logarithm of the probability that a trial can
            be used, minus that of its seconds, ``(b,)``; ``None``: 0.
        seed: Seed of the samples.
    """

    def __init__(
        self,
        model: Model,
        baseline: Tensor,
        pending: Tensor | None = None,
        log_worth: Callable[[Tensor], Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model)
        self._log_worth = log_worth
        pending = None if pending is None or len(pending) == 0 else pending
        self._improvement = qLogNoisyExpectedImprovement(
            model,
            X_baseline=baseline,
            sampler=SobolQMCNormalSampler(torch.Size([_SAMPLES]), seed=seed),
            objective=LinearMCObjective(torch.tensor([-1.0], dtype=torch.float64)),
            X_pending=pending,
            prune_baseline=True,
        )
        super().set_X_pending(pending)

    def set_X_pending(self, X_pending: Tensor | None = None) -> None:
        """Replace the points of running trials, ``m x d``; ``None``: there are none."""
        super().set_X_pending(X_pending)
        self._improvement.set_X_pending(X_pending)

    @t_batch_mode_transform(expected_q=1)  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        """Return the values at points, ``b x 1 x d``: ``(b,)``; finite."""
        values: Tensor = self._improvement(X)
        lowest = {"nan": _LOWEST_SCORE, "neginf": _LOWEST_SCORE, "posinf": _LOWEST_SCORE}
        values = values.nan_to_num(**lowest)
        return values if self._log_worth is None else values + self._log_worth(X)


class FinitePosterior(GPyTorchModel):
    """A model of finitely many points, each of which is used jointly with anchors only.

    An ``X`` of this model has one column, the number of a point. Points can be added.

    Args:
        surrogate: The fitted model.
        anchors: The first points, ``k x d``.
    """

    def __init__(self, surrogate: Surrogate, anchors: FloatArray) -> None:
        super().__init__()
        self._surrogate, self._count = surrogate, len(anchors)
        self._anchors = surrogate.inputs(anchors)
        self.points, self.mean = anchors[:0], np.empty(0)
        self._rows, self._variance = np.empty((len(anchors), 0)), np.empty(0)
        self._append(anchors, self._anchors[:0], first=0)

    @property
    def num_outputs(self) -> int:
        """One: the log step time."""
        return 1

    @property
    def batch_shape(self) -> torch.Size:
        """Empty: it is one model."""
        return torch.Size()

    def add(self, points: FloatArray, inputs: Tensor) -> Tensor:
        """Add points, ``n x d``, with the surrogate's inputs; return their ``X``, ``n x 1``."""
        before = len(self.points)
        self._append(points, inputs, first=self._count)
        return torch.arange(before, len(self.points), dtype=torch.float64).unsqueeze(-1)

    def _append(self, points: FloatArray, inputs: Tensor, first: int) -> None:
        mean, rows, variance = self._surrogate.joint_with(self._anchors, inputs)
        self.points = np.concatenate([self.points, points])
        self.mean = np.concatenate([self.mean, mean[first:]])
        self._rows = np.concatenate([self._rows, rows[:, first:]], axis=1)
        self._variance = np.concatenate([self._variance, variance[first:]])

    def posterior(self, X: Tensor, *_: object, **__: object) -> GPyTorchPosterior:
        """Return the joint posterior at ``X``, ``b x q x 1``, of which one at most is no anchor."""
        number = X[..., 0].long().numpy()  # b x q
        one, other = number[..., :, None], number[..., None, :]
        low, high = np.minimum(one, other), np.maximum(one, other)
        # Two points that are no anchors are one and the same: its variance.
        covariance = np.where(
            low < self._count,
            self._rows[np.minimum(low, self._count - 1), high],
            self._variance[low],
        )
        mean, joint = torch.from_numpy(self.mean[number]), torch.from_numpy(covariance)
        return GPyTorchPosterior(MultivariateNormal(mean, to_linear_operator(joint)))


def _everywhere(points: FloatArray) -> BoolArray:
    return np.ones(len(points), dtype=np.bool_)


def propose(
    surrogate: Surrogate,
    tried: FloatArray,
    pending: FloatArray,
    seed: int,
    log_utility: LogUtility | None = None,
    incumbents: BoolArray | None = None,
    usable: Mask = _everywhere,
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
        usable: Whether points may ever be used; others are proposed only if no candidate may.

    Returns:
        The point, shape ``(d,)``, and its score: the logarithm of its expected improvement plus
        ``log_utility``. ``None`` if every candidate is tried or pending.
    """
    best_so_far = tried if incumbents is None or not incumbents.any() else tried[incumbents]
    tried, pending, best_so_far = distinct(tried), distinct(pending), distinct(best_so_far)
    ranked = np.argsort(surrogate.mean_at(best_so_far), kind="stable")
    centers = best_so_far[ranked[:_CENTERS]]
    best_so_far = best_so_far[np.sort(ranked[:_MOST_BASELINE])]
    pool, complete = candidate_pool(surrogate.space, centers, seed)
    excluded = {*keys(tried), *keys(pending)}
    pool = distinct(pool, excluded)
    if len(pool) == 0:
        return None
    pool = pool[preferred(usable(pool))]
    inputs = surrogate.inputs(pool)
    if not complete:
        kept = _promising(surrogate.mean_of(inputs))
        pool, inputs = pool[kept], inputs[torch.from_numpy(kept)]
    with isolated(seed), torch.no_grad():
        score = Score(surrogate, best_so_far, pending, seed, log_utility)
        scores = score(pool, inputs)
        if not complete:
            pool, scores = _local_search(surrogate, pool, scores, score, excluded, usable)
    best = int(np.argmax(np.where(preferred(usable(pool)), scores, -np.inf)))
    return pool[best], float(scores[best])


def _promising(log_step: FloatArray) -> npt.NDArray[np.intp]:
    """Indices of the smallest values and of some others, evenly spaced by rank."""
    order = np.argsort(log_step, kind="stable")
    others = order[_BEST:]
    return np.concatenate([order[:_BEST], others[:: max(-(-len(others) // _OTHERS), 1)]])


class Score:
    """The acquisition function at points that are given in sets; larger is better.

    Args:
        surrogate: The fitted model.
        baseline: The points to improve on, ``n x d``.
        pending: The points of running trials, ``m x d``.
        seed: Seed of the samples.
        log_utility: As of :func:`propose`.
    """

    def __init__(
        self,
        surrogate: Surrogate,
        baseline: FloatArray,
        pending: FloatArray,
        seed: int,
        log_utility: LogUtility | None,
    ) -> None:
        anchors = np.concatenate([baseline, pending])
        self._model = FinitePosterior(surrogate, anchors)
        self._log_utility = log_utility
        numbers = torch.arange(len(anchors), dtype=torch.float64).unsqueeze(-1)
        self._acquisition = LogExpectedUtility(
            self._model,
            numbers[: len(baseline)],
            numbers[len(baseline) :],
            None if log_utility is None else self._log_worth,
            seed,
        )

    def __call__(self, points: FloatArray, inputs: Tensor) -> FloatArray:
        """Return the scores of points, ``n x d``, with the surrogate's inputs there: ``(n,)``."""
        values: FloatArray = self._acquisition(
            self._model.add(points, inputs).unsqueeze(-2)
        ).numpy()
        return values

    def _log_worth(self, numbers: Tensor) -> Tensor:
        assert self._log_utility is not None
        index = numbers[:, 0, 0].long().numpy()
        return torch.from_numpy(
            self._log_utility(self._model.points[index], self._model.mean[index])
        )


def _local_search(
    surrogate: Surrogate,
    pool: FloatArray,
    scores: FloatArray,
    score: Score,
    excluded: set[bytes],
    usable: Mask,
) -> tuple[FloatArray, FloatArray]:
    """Search the neighbours of the pool's best points in a few rounds; return points and scores."""
    seen = excluded | set(keys(pool))
    for steps in _ROUNDS:
        order = np.argsort(-scores, kind="stable")[:_TOP]
        pool, scores = pool[order], scores[order]
        neighbours = distinct(one_knob_away(surrogate.space, pool, steps), seen)
        neighbours = neighbours[usable(neighbours)]
        if len(neighbours) == 0:
            break
        seen.update(keys(neighbours))
        pool = np.concatenate([pool, neighbours])
        scores = np.concatenate([scores, score(neighbours, surrogate.inputs(neighbours))])
    return pool, scores
