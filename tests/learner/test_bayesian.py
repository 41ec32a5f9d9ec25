from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hvd_autosync.learner import (
    BayesianLearner,
    Learner,
    Observation,
    RandomLearner,
    SobolLearner,
    best_tried,
    gp,
)
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace, Strategy

Tell = Callable[..., Observation]


def study(space: SearchSpace, learner: Learner, tell: Tell, trials: int, seed: int = 0):  # type: ignore[no-untyped-def]
    """The observations of a study that measures the default first."""
    seen = [tell(space.default, seed)]
    while len(seen) < trials:
        suggestion = learner.suggest(Problem(space), seen, seed=seed)
        assert suggestion is not None
        seen.append(tell(suggestion.strategy, seed))
    return seen


def initial(space: SearchSpace, tell: Tell, count: int = 8) -> list[Observation]:
    return study(space, SobolLearner(), tell, count)


def test_what_crashed_is_no_rival(
    mixed_space: SearchSpace, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hvd_autosync.learner import bayesian

    given = []

    def propose(*arguments: object) -> None:
        given.append(arguments[5])

    monkeypatch.setattr(bayesian, "propose", propose)
    seen = initial(mixed_space, tell)
    seen[3] = Observation(seen[3].strategy, None)
    BayesianLearner().suggest(Problem(mixed_space), seen, seed=0)
    assert np.flatnonzero(~np.asarray(given[0])).tolist() == [3]


def test_it_is_a_pure_function(mixed_space: SearchSpace, tell: Tell) -> None:
    seen = initial(mixed_space, tell)
    seen[5] = Observation(seen[5].strategy, None)  # so that there is a model of failures, too
    states = (torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    threads = torch.get_num_threads()
    learner = BayesianLearner()
    first = learner.suggest(Problem(mixed_space), seen, seed=3)
    torch.rand(5)  # someone else draws random numbers in between
    state = torch.random.get_rng_state()
    learner.suggest(Problem(mixed_space), seen[:6], seed=4)
    gp._fit.cache_clear()
    again = BayesianLearner().suggest(Problem(mixed_space), list(seen), seed=3)
    assert first == again  # bit for bit, predictions included
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]
    assert torch.get_num_threads() == threads
    # Nor does it depend on what a script or a notebook has set in torch.
    others = (
        (torch.set_grad_enabled, False, torch.is_grad_enabled()),
        (torch.set_default_dtype, torch.float64, torch.get_default_dtype()),
        (torch.set_default_device, "meta", None),
    )
    for change, other, usual in others:
        gp._fit.cache_clear()
        change(other)
        try:
            changed = BayesianLearner().suggest(Problem(mixed_space), seen, seed=3)
            kept = torch.is_grad_enabled(), torch.get_default_dtype(), torch.empty(0).device.type
        finally:
            change(usual)
        assert changed == first, change
        assert other in kept, change
    gp._fit.cache_clear()
    with torch.inference_mode():
        assert BayesianLearner().suggest(Problem(mixed_space), seen, seed=3) == first
        assert torch.is_inference_mode_enabled()


def test_a_remembered_model_answers_like_a_fresh_one(mixed_space: SearchSpace, tell: Tell) -> None:
    seen = initial(mixed_space, tell)
    fresh = BayesianLearner().suggest(Problem(mixed_space), seen, seed=0)
    gp._fit.cache_clear()
    BayesianLearner().suggest(Problem(mixed_space), seen, seed=1)
    assert BayesianLearner().suggest(Problem(mixed_space), seen, seed=0) == fresh


def test_sobol_points_come_first_and_then_the_model(mixed_space: SearchSpace, tell: Tell) -> None:
    learner, seen, kinds = BayesianLearner(initial_points=3), [tell(mixed_space.default)], []
    for _ in range(5):
        suggestion = learner.suggest(Problem(mixed_space), seen, seed=0)
        assert suggestion is not None
        kinds.append(suggestion.kind)
        seen += [tell(suggestion.strategy), tell(suggestion.strategy, 1)]  # repeats count once
    assert kinds == ["sobol"] * 3 + ["model"] * 2


def test_the_model_waits_for_a_measurement(mixed_space: SearchSpace, tell: Tell) -> None:
    failed = [Observation(seen.strategy, None) for seen in initial(mixed_space, tell)]
    suggestion = BayesianLearner().suggest(Problem(mixed_space), failed, seed=0)
    assert suggestion is not None and suggestion.kind == "sobol"


def test_its_info_is_plain_json(mixed_space: SearchSpace, tell: Tell) -> None:
    suggestion = BayesianLearner().suggest(Problem(mixed_space), initial(mixed_space, tell), seed=0)
    assert suggestion is not None
    info = json.loads(json.dumps(suggestion.info, allow_nan=False))
    assert info == suggestion.info
    assert info["predicted_low_s"] < info["predicted_step_s"] < info["predicted_high_s"]
    assert 0.05 < info["predicted_step_s"] < 1


def test_nothing_is_tried_twice_and_the_end_is_none(tiny_space: SearchSpace) -> None:
    learner, tried = BayesianLearner(initial_points=2), [tiny_space.default]
    while suggestion := learner.suggest(
        Problem(tiny_space), [Observation(s, 1.0 + len(s)) for s in tried[:-1]], tried[-1:], seed=0
    ):
        tried.append(suggestion.strategy)
        assert len(tried) <= 9
    assert len(set(tried)) == 9


@pytest.mark.parametrize("knobs", [0, 1])
def test_without_free_knobs_there_is_nothing_to_try(tiny_space: SearchSpace, knobs: int) -> None:
    fixed = [knob.restrict([knob.default]) for knob in tiny_space.knobs[:knobs]]  # type: ignore[call-arg, list-item]
    assert BayesianLearner().suggest(Problem(SearchSpace(tuple(fixed))), [], seed=0) is None


def test_pending_strategies_are_not_proposed(mixed_space: SearchSpace, tell: Tell) -> None:
    seen, learner, pending = initial(mixed_space, tell), BayesianLearner(), list[Strategy]()
    for _ in range(3):
        suggestion = learner.suggest(Problem(mixed_space), seen, pending, seed=0)
        assert suggestion is not None and suggestion.kind == "model"
        pending.append(suggestion.strategy)
    assert len({*pending, *(o.strategy for o in seen)}) == len(seen) + 3


def test_conditional_and_fixed_knobs_are_respected(mixed_space: SearchSpace, tell: Tell) -> None:
    codec = mixed_space["codec"].restrict(["int8"])  # type: ignore[call-arg, union-attr]
    cycle = mixed_space["cycle"].restrict(5.0, 5.0)  # type: ignore[call-arg, union-attr]
    names = [knob.name for knob in mixed_space.knobs]
    knobs = list(mixed_space.knobs)
    knobs[names.index("codec")], knobs[names.index("cycle")] = codec, cycle
    space = SearchSpace(tuple(knobs))
    seen = study(space, BayesianLearner(), tell, 14)
    for strategy in (o.strategy for o in seen):
        assert strategy == space.complete(strategy)
        assert (strategy["codec"], strategy["cycle"]) == ("int8", 5.0)
        assert ("torus" in strategy) == (not strategy["hierarchical"])
        assert ("group_fusion" in strategy) == (strategy["groups"] != 0)


def test_it_beats_random_search(
    mixed_space: SearchSpace, tell: Tell, log_step: Callable[[Strategy], float]
) -> None:
    regret: dict[str, list[float]] = {"bayesian": [], "random": []}
    for seed in range(3):
        for learner in (BayesianLearner(), RandomLearner()):
            seen = study(mixed_space, learner, tell, 20, seed)
            best = best_tried(Problem(mixed_space), seen, 1)[0]
            regret[learner.name].append(log_step(best) + 2.0)
    assert statistics.median(regret["bayesian"]) < 0.5 * statistics.median(regret["random"])
    assert statistics.median(regret["bayesian"]) < 0.08


def test_it_avoids_what_fails(mixed_space: SearchSpace, tell: Tell) -> None:
    """int8 fails here, in a third of the space."""

    def partly_failing(strategy: Strategy, seed: int = 0) -> Observation:
        seen = tell(strategy, seed)
        return Observation(strategy, None) if strategy["codec"] == "int8" else seen

    seen = study(mixed_space, BayesianLearner(initial_points=6), partly_failing, 19)
    assert sum(not o.measured for o in seen[:7]) >= 1
    assert sum(not o.measured for o in seen[7:]) <= 2


@pytest.mark.parametrize(
    "steps",
    [
        [0.1] * 6,
        [0.1, None, None, None, None, None],
        [math.nan, math.inf, -1.0, 0.0, 0.2, None],
        [1e-9, 1e9, 1e-9, 1e9, 1.0, 1e9],
    ],
)
def test_odd_data_never_stops_it(
    mixed_space: SearchSpace, tell: Tell, steps: list[float | None]
) -> None:
    tried = [o.strategy for o in initial(mixed_space, tell, 6)]
    seen = [Observation(s, t, math.nan) for s, t in zip(tried, steps, strict=True)] * 2
    suggestion = BayesianLearner().suggest(Problem(mixed_space), seen, seed=0)
    assert suggestion is not None and suggestion.kind == "model"
    assert suggestion.strategy not in tried
    json.dumps(suggestion.info, allow_nan=False)


def test_one_observation_is_enough(mixed_space: SearchSpace, tell: Tell) -> None:
    seen = [tell(mixed_space.default)]
    suggestion = BayesianLearner(initial_points=0).suggest(Problem(mixed_space), seen, seed=0)
    assert suggestion is not None and suggestion.kind == "model"


def test_what_can_never_be_used_is_not_proposed(mixed_space: SearchSpace, tell: Tell) -> None:
    """However much faster it is; or exploring would end with something left of the others."""
    codec = [knob.name for knob in mixed_space.knobs].index("codec")

    def fast(strategy: Strategy) -> Observation:
        seen = tell(strategy)
        factor = 1.0 if strategy["codec"] == "none" else 0.1
        assert seen.step_s is not None
        return Observation(strategy, factor * seen.step_s)

    problem = Problem(mixed_space, feasible=lambda points: (points[:, codec] == 0.0).astype(float))
    seen = [fast(o.strategy) for o in initial(mixed_space, tell, 12)]
    suggestion = BayesianLearner().suggest(problem, seen, seed=0)
    assert suggestion is not None and suggestion.kind == "model"
    assert suggestion.strategy["codec"] == "none" and suggestion.info["expected_gain"] > 0.01
    first = BayesianLearner().suggest(problem, seen[:2], seed=0)
    assert first is not None and first.kind == "sobol" and first.strategy["codec"] == "none"
