from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hvd_autosync.learner import BayesianLearner, Observation, fit
from hvd_autosync.learner.points import sobol_points
from hvd_autosync.learner.prior_functions import PriorFunction, drop_constant, normalize_weights
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.search_space import SearchSpace, Strategy

LogStep = Callable[[Strategy], float]


def unrelated(strategy: Strategy) -> float:
    """Of knobs that do not matter to ``log_step``."""
    return 0.5 * int(strategy["streams"]) + (0.6 if strategy.get("torus") else 0.0)


def sources(space: SearchSpace, tasks: dict[str, LogStep]) -> tuple[Source, ...]:
    """Tasks with 40 trials each and step times by these functions."""
    points = [space.decode(point) for point in sobol_points(space, 40, seed=9)]
    found = []
    for name, function in tasks.items():
        seen = tuple(Observation(s, math.exp(function(s))) for s in points)
        found.append(Source(name, None, space, seen, 0.8))
    return tuple(found)


def sources_used(
    space: SearchSpace, log_step: LogStep, tasks: dict[str, LogStep], trials: int
) -> list[str]:
    """Names of the sources that are used after so many trials."""
    tried = [space.decode(point) for point in sobol_points(space, trials, seed=2)]
    seen = [Observation(s, math.exp(log_step(s))) for s in tried]
    problem = Problem(space, sources=sources(space, tasks))
    return [prior.name for prior in fit(problem, seen).priors]


def test_two_sources_with_the_same_error_are_both_dropped(
    mixed_space: SearchSpace, log_step: LogStep
) -> None:
    tasks = {"wrong": unrelated, "wrong too": unrelated, "right": log_step}
    assert sources_used(mixed_space, log_step, tasks, 8) == ["right"]


def test_the_remaining_source_is_used_as_if_alone(
    mixed_space: SearchSpace, log_step: LogStep
) -> None:
    """The weights of the dropped sources go to the others."""
    tried = [mixed_space.decode(point) for point in sobol_points(mixed_space, 8, seed=2)]
    seen = [Observation(s, math.exp(log_step(s))) for s in tried]
    both = sources(mixed_space, {"right": log_step, "wrong": unrelated})
    together, alone = (fit(Problem(mixed_space, sources=some), seen) for some in (both, both[:1]))
    assert [e.prior_mean for e in together.priors] == [(0.8,)]
    assert list(together.dropped) == ["wrong"] and together.dropped["wrong"] >= 0.5
    assert not alone.dropped
    assert [e.prior_mean for e in alone.priors] == [(0.8,)]
    unseen = sobol_points(mixed_space, 20, seed=3)
    assert np.array_equal(together.mean_at(unseen), alone.mean_at(unseen))


def test_a_dropped_source_costs_two_more_initial_points(
    mixed_space: SearchSpace, log_step: LogStep
) -> None:
    """Two more initial points are tried than without any source."""
    points = [mixed_space.decode(point) for point in sobol_points(mixed_space, 9, seed=2)]
    others = [point for point in points if point != mixed_space.default]
    wrong = sources(mixed_space, {"wrong": unrelated})

    def kind(count: int, some: tuple[Source, ...]) -> str:
        tried = [mixed_space.default, *others[:count]]
        seen = [Observation(s, math.exp(log_step(s))) for s in tried]
        suggestion = BayesianLearner().suggest(Problem(mixed_space, sources=some), seen, seed=0)
        assert suggestion is not None
        return suggestion.kind

    assert [kind(count, ()) for count in (3, 4)] == ["sobol", "model"]
    assert [kind(count, wrong) for count in (5, 6)] == ["sobol", "model"]


def test_an_adversarial_source_soon_gets_a_negative_weight(
    mixed_space: SearchSpace, log_step: LogStep
) -> None:
    """An anti-correlated source is as informative as a correct one."""
    tried = [mixed_space.decode(point) for point in sobol_points(mixed_space, 5, seed=2)]
    seen = [Observation(s, math.exp(log_step(s))) for s in tried]
    adversarial = sources(mixed_space, {"adversarial": lambda strategy: -3 * log_step(strategy)})
    unseen = sobol_points(mixed_space, 60, seed=3)
    truth = np.array([log_step(mixed_space.decode(point)) for point in unseen])
    alone, transferred = (
        fit(Problem(mixed_space, sources=some), seen) for some in ((), adversarial)
    )
    agrees = [np.corrcoef(model.mean_at(unseen), truth)[0, 1] for model in (alone, transferred)]
    assert agrees[1] > max(agrees[0], 0.8)


@pytest.mark.parametrize("kind", ["adversarial", pytest.param("unrelated", marks=pytest.mark.wide)])
def test_negative_transfer_costs_two_trials_at_most(
    mixed_space: SearchSpace, log_step: LogStep, kind: str
) -> None:
    """After two more trials the medians of five seeds are as near to the optimum."""
    wrong = {"adversarial": lambda strategy: -3 * log_step(strategy), "unrelated": unrelated}
    cold = [regrets(mixed_space, log_step, (), seed) for seed in range(5)]
    some = sources(mixed_space, {kind: wrong[kind]})
    transferred = [regrets(mixed_space, log_step, some, seed) for seed in range(5)]
    for trials in (8, 12):
        after = statistics.median(game[trials + 2] for game in transferred)
        before = statistics.median(game[trials] for game in cold)
        assert after <= before + 0.02, trials


def regrets(
    space: SearchSpace, log_step: LogStep, some: tuple[Source, ...], seed: int
) -> list[float]:
    """By how much the best one tried so far is above the optimum, -2, the default's first."""
    problem, best = Problem(space, sources=some), [log_step(space.default) + 2.0]
    seen = [Observation(space.default, math.exp(log_step(space.default)))]
    for _ in range(14):
        suggestion = BayesianLearner().suggest(problem, seen, seed=seed)
        assert suggestion is not None
        step = log_step(suggestion.strategy)
        seen.append(Observation(suggestion.strategy, math.exp(step)))
        best.append(min(best[-1], step + 2.0))
    return best


def test_two_trials_are_too_few_to_drop_a_source(
    mixed_space: SearchSpace, log_step: LogStep
) -> None:
    assert sources_used(mixed_space, log_step, {"wrong": unrelated}, 2) == ["wrong"]


def test_a_source_is_not_constant_because_of_a_small_weight(
    mixed_space: SearchSpace, log_step: LogStep
) -> None:
    (source,) = sources(mixed_space, {"right": lambda strategy: 0.05 * log_step(strategy)})
    problem = Problem(mixed_space, sources=(replace(source, similarity=0.1),))
    fitted = fit(problem, [Observation(mixed_space.default, 1.0)])
    assert [prior.name for prior in fitted.priors] == ["right"]


def test_a_constant_prior_function_is_dropped(mixed_space: SearchSpace, log_step: LogStep) -> None:
    assert sources_used(mixed_space, log_step, {"flat": lambda _: 0.0}, 2) == []
    flat = PriorFunction("flat", lambda points: np.full((len(points), 1), 0.3), (1.0,), (0.3,))
    assert drop_constant(mixed_space, [flat]) == []


def test_prior_functions_of_one_basis_share_their_weight() -> None:
    priors = [
        PriorFunction(str(w), lambda points: points[:, :1], (w,), (0.4,)) for w in (0.9, 0.6, 0.5)
    ]
    assert [round(*e.prior_mean, 3) for e in normalize_weights(priors)] == [0.45, 0.3, 0.25]
    assert [e.prior_mean for e in normalize_weights(priors[1:2])] == [(0.6,)]
