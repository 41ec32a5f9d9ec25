from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from botorch.acquisition import AcquisitionFunction
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.acquisition.objective import LinearMCObjective
from botorch.optim import optimize_acqf_discrete
from botorch.sampling.normal import SobolQMCNormalSampler

from hvd_autosync.learner import Observation, acquisition, fit
from hvd_autosync.learner.acquisition import LogExpectedUtility, Score, propose
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.points import FloatArray, encode_all, every_point, keys, sobol_points
from hvd_autosync.learner.pool import one_knob_away
from hvd_autosync.learner.problem import Problem
from hvd_autosync.learner.surrogate import Surrogate
from hvd_autosync.search_space import SearchSpace

Tell = Callable[..., Observation]


@pytest.fixture
def seen(mixed_space: SearchSpace, tell: Tell) -> list[Observation]:
    return [tell(mixed_space.decode(point)) for point in sobol_points(mixed_space, 20, seed=0)]


def test_it_proposes_what_is_predicted_fast_or_unknown(
    mixed_space: SearchSpace, seen: list[Observation]
) -> None:
    surrogate = fit(Problem(mixed_space), seen)
    tried = encode_all(mixed_space, [o.strategy for o in seen])
    found = propose(surrogate, tried, tried[:0], seed=0)
    assert found is not None
    mean, covariance = surrogate.joint_at(np.concatenate([found[0][None], tried]))
    assert mean[0] - 2 * math.sqrt(covariance[0, 0]) < mean[1:].min()
    assert mean[0] < np.median(mean[1:])


def test_local_search_improves_on_the_pool(
    mixed_space: SearchSpace, seen: list[Observation], monkeypatch: pytest.MonkeyPatch
) -> None:
    surrogate = fit(Problem(mixed_space), seen)
    tried = encode_all(mixed_space, [o.strategy for o in seen])
    searched = propose(surrogate, tried, tried[:0], seed=0)
    monkeypatch.setattr(acquisition, "_ROUNDS", ())
    unsearched = propose(surrogate, tried, tried[:0], seed=0)
    assert searched is not None and unsearched is not None
    assert searched[1] > unsearched[1]


def test_only_incumbents_are_to_be_improved_on(
    mixed_space: SearchSpace, seen: list[Observation]
) -> None:
    surrogate = fit(Problem(mixed_space), seen)
    tried = encode_all(mixed_space, [o.strategy for o in seen])
    incumbents = np.ones(len(tried), dtype=bool)
    incumbents[np.argsort(surrogate.mean_at(tried))[:5]] = False
    beside_all = propose(surrogate, tried, tried[:0], seed=0)
    beside_incumbents = propose(surrogate, tried, tried[:0], seed=0, incumbents=incumbents)
    assert beside_all is not None and beside_incumbents is not None
    assert beside_incumbents[1] > beside_all[1] + 0.5


def test_of_many_incumbents_the_best_are_to_be_improved_on(
    mixed_space: SearchSpace, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing matters pruning would keep nearly all of them."""
    baselines: list[FloatArray] = []

    class Seen(Score):
        def __init__(self, surrogate: Surrogate, best_so_far: FloatArray, *rest: Any) -> None:
            baselines.append(best_so_far)
            super().__init__(surrogate, best_so_far, *rest)

    monkeypatch.setattr(acquisition, "Score", Seen)
    many = [tell(mixed_space.decode(point)) for point in sobol_points(mixed_space, 60, seed=0)]
    surrogate = fit(Problem(mixed_space), many)
    tried = encode_all(mixed_space, [o.strategy for o in many])
    assert propose(surrogate, tried[:30], tried[:0], seed=0) is not None
    assert propose(surrogate, tried, tried[:0], seed=0) is not None
    few, bounded = baselines
    assert np.array_equal(few, tried[:30])
    best = tried[np.sort(np.argsort(surrogate.mean_at(tried), kind="stable")[:40])]
    assert np.array_equal(bounded, best)


def test_pending_points_repel(mixed_space: SearchSpace, seen: list[Observation]) -> None:
    surrogate = fit(Problem(mixed_space), seen)
    tried = encode_all(mixed_space, [o.strategy for o in seen])
    first = propose(surrogate, tried, tried[:0], seed=0)
    assert first is not None
    second = propose(surrogate, tried, first[0][None], seed=0)
    assert second is not None
    assert keys(second[0][None]) != keys(first[0][None])
    # Near a candidate that is on its way, less is left to gain.
    near = one_knob_away(mixed_space, first[0][None], (0.01,))
    with torch.no_grad():
        inputs = surrogate.inputs(near)
        before = Score(surrogate, tried, tried[:0], 0, None)(near, inputs)
        after = Score(surrogate, tried, first[0][None], 0, None)(near, inputs)
    assert (after < before - 0.1).all()


def test_several_points_at_once_are_those_of_botorch(
    mixed_space: SearchSpace, seen: list[Observation]
) -> None:
    model = fit(Problem(mixed_space), seen).model
    baseline = torch.from_numpy(encode_all(mixed_space, [o.strategy for o in seen]))
    choices = torch.from_numpy(sobol_points(mixed_space, 60, seed=7))

    def botorchs() -> AcquisitionFunction:
        return qLogNoisyExpectedImprovement(
            model,
            X_baseline=baseline,
            sampler=SobolQMCNormalSampler(torch.Size([128]), seed=0),
            objective=LinearMCObjective(torch.tensor([-1.0], dtype=torch.float64)),
            prune_baseline=True,
        )

    chosen = []
    for make in (botorchs, lambda: LogExpectedUtility(model, baseline)):
        with isolated():  # the baseline is pruned by random samples
            chosen.append(optimize_acqf_discrete(make(), q=3, choices=choices))
    (expected, theirs), (found, values) = chosen
    assert torch.equal(found, expected)
    assert torch.equal(values, theirs)


def test_only_untried_points_are_left(tiny_space: SearchSpace) -> None:
    points = every_point(tiny_space)
    assert points is not None
    seen = [Observation(tiny_space.decode(point), 1.0) for point in points]
    surrogate = fit(Problem(tiny_space), seen)
    found = propose(surrogate, points[:7], points[7:8], seed=0)
    assert found is not None and keys(found[0][None]) == keys(points[8:])
    assert propose(surrogate, points[:7], points[7:], seed=0) is None
