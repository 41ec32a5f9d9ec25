"""Prior functions before the first trial, and how soon trials outweigh them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hvd_autosync.cost import CostModel
from hvd_autosync.cost.coefficients import Coefficients
from hvd_autosync.learner import BayesianLearner, Observation, fit
from hvd_autosync.learner.hyperprior import SHIPPED
from hvd_autosync.learner.points import encode_all, sobol_points
from hvd_autosync.learner.prior_functions import (
    PriorFunction,
    cost_model_prior,
    discount_implausible,
)
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.search_space import (
    Host,
    Link,
    Links,
    ModelProfile,
    Resources,
    SearchSpace,
    Strategy,
    Task,
    build_space,
)

LogStep = Callable[[Strategy], float]


@pytest.fixture
def task(model: ModelProfile, slow_network: Resources) -> Task:
    return Task(model, slow_network)


@pytest.fixture
def space(task: Task) -> SearchSpace:
    return build_space(task.model, task.resources, held={"controller": "gloo"})


def spread(space: SearchSpace, count: int, seed: int = 0) -> list[Strategy]:
    return [space.decode(point) for point in sobol_points(space, count, seed)]


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def test_the_cost_model_ranks_strategies_before_any_trial(task: Task, space: SearchSpace) -> None:
    """With only the default's time the model ranks strategies as the cost model does."""
    seconds = CostModel(task.model, task.resources).predict
    some = spread(space, 100)
    seen = [Observation(space.default, float(seconds([space.default])[0]))]
    with_cost_model = fit(Problem(space, task), seen).predict(some)[0]
    assert rank_correlation(with_cost_model, seconds(some)) > 0.95
    assert with_cost_model == pytest.approx(np.log(seconds(some)), abs=0.15)
    assert abs(rank_correlation(fit(Problem(space), seen).predict(some)[0], seconds(some))) < 0.7


def test_with_a_cost_model_the_first_proposal_is_good(task: Task, space: SearchSpace) -> None:
    seconds = CostModel(task.model, task.resources).predict
    seen = [Observation(space.default, float(seconds([space.default])[0]))]
    suggestion = BayesianLearner().suggest(Problem(space, task), seen, seed=0)
    assert suggestion is not None and suggestion.kind == "model"
    assert suggestion.info["priors"] == ["cost model"]
    best = seconds(spread(space, 500, seed=3)).min()
    assert seconds([suggestion.strategy])[0] < 1.05 * best


def test_a_wrong_cost_model_does_no_lasting_harm(task: Task, space: SearchSpace) -> None:
    """Step times are the opposite of what the cost model says."""
    cost = CostModel(task.model, task.resources)

    def truth(strategies: list[Strategy]) -> np.ndarray:
        return np.asarray(-0.5 * np.log(cost.predict(strategies)) - 2.0)

    unseen = spread(space, 100, seed=5)
    errors = []
    for problem in (Problem(space, task), Problem(space)):
        tried = spread(space, 20)
        seen = [Observation(s, math.exp(y)) for s, y in zip(tried, truth(tried), strict=True)]
        error = fit(problem, seen).predict(unseen)[0] - truth(unseen)
        errors.append(float(np.sqrt((error**2).mean())))
    assert errors[0] < 1.25 * errors[1]


def test_trials_calibrate_the_cost_model(task: Task, space: SearchSpace) -> None:
    """A quiet cluster that is slower in one way; the intervals count no trial twice."""
    quiet = replace(SHIPPED, launch_noise=0.02)
    slow = Coefficients(latency=0.8, byte=-0.2, rest=0.5)
    cost = CostModel(task.model, task.resources)
    tried, unseen = spread(space, 6), spread(space, 200, seed=5)
    times = cost.predict(tried, slow)
    seen = [Observation(s, float(t), 0.01 * t) for s, t in zip(tried, times, strict=True)]
    mean, deviation = fit(Problem(space, task, hyperprior=quiet), seen).predict(unseen)
    error = np.abs(mean - np.log(cost.predict(unseen, slow)))
    uncalibrated = np.log(cost.predict(unseen) / cost.predict(unseen, slow))
    assert np.sqrt((error**2).mean()) < 0.5 * uncalibrated.std()
    assert (error < 1.645 * deviation).mean() > 0.8


@pytest.mark.parametrize("missing", ["links", "times"])
def test_without_measurements_there_is_no_cost_model(
    task: Task, space: SearchSpace, missing: str
) -> None:
    model, resources = task.model, task.resources
    if missing == "links":
        resources = Resources(resources.hosts, "cpu", resources.build, Links())
    else:
        model = ModelProfile(model.parameters)
    assert cost_model_prior(space, Task(model, resources), []) is None
    assert cost_model_prior(space, None, []) is None


def test_that_nothing_matters_is_not_that_nothing_is_known(task: Task, space: SearchSpace) -> None:
    """Without traffic all strategies are equal, and few trials are enough to believe that."""
    alone = replace(task, resources=replace(task.resources, hosts=(Host("a", 1),), links=Links()))
    points = spread(space, 64)
    assert np.ptp(CostModel(alone.model, alone.resources).predict(points)) == 0.0
    seen = [Observation(space.default, 0.1)]
    known, unknown = fit(Problem(space, alone), seen), fit(Problem(space), seen)
    assert known.has_cost_model
    assert (known.predict(points)[1] < 0.5 * unknown.predict(points)[1]).all()


def test_a_cost_model_that_sees_no_knob_is_none(task: Task, mixed_space: SearchSpace) -> None:
    assert cost_model_prior(mixed_space, task, []) is None


def test_the_mean_alone_is_the_posterior_mean_with_prior_functions_too(
    task: Task, space: SearchSpace
) -> None:
    tried = spread(space, 12)
    seconds = CostModel(task.model, task.resources).predict(tried)
    seen = [Observation(s, float(t)) for s, t in zip(tried, seconds, strict=True)]
    surrogate = fit(Problem(space, task), seen)
    points = encode_all(space, spread(space, 8, seed=2))
    assert surrogate.mean_at(points) == pytest.approx(surrogate.joint_at(points)[0], abs=1e-6)


def source(
    space: SearchSpace, log_step: LogStep, sign: float = 1.0, similarity: float = 0.8
) -> Source:
    """A task with 40 trials whose step times are those of ``log_step``, or their opposite."""
    seen = [Observation(s, math.exp(sign * log_step(s) - 1.0)) for s in spread(space, 40, seed=9)]
    return Source("there", None, space, tuple(seen), similarity)


def test_a_related_task_tells_where_to_begin(mixed_space: SearchSpace, log_step: LogStep) -> None:
    """The optimum is -2, the default about -1.17; the source's times are e times shorter."""
    default = Observation(mixed_space.default, math.exp(log_step(mixed_space.default)))
    problem = Problem(mixed_space, sources=(source(mixed_space, log_step),))
    suggestion = BayesianLearner().suggest(problem, [default], seed=0)
    assert suggestion is not None and suggestion.kind == "model"
    assert log_step(suggestion.strategy) < -1.85
    assert suggestion.info["predicted_step_s"] == pytest.approx(math.exp(-1.95), rel=0.2)


def test_a_task_that_misleads_asks_for_two_trials(
    mixed_space: SearchSpace, log_step: LogStep
) -> None:
    """The source says the opposite: its advice comes to nothing, and points are spread."""
    problem = Problem(mixed_space, sources=(source(mixed_space, log_step, sign=-1.0),))
    seen = [Observation(mixed_space.default, math.exp(log_step(mixed_space.default)))]
    kinds = []
    for _ in range(3):
        suggestion = BayesianLearner().suggest(problem, seen, seed=0)
        assert suggestion is not None
        kinds.append(suggestion.kind)
        # Neither has become faster, whatever was asked for.
        seen.append(Observation(suggestion.strategy, math.exp(log_step(mixed_space.default))))
    assert kinds == ["model", "model", "sobol"]


def test_advice_that_pays_is_followed(mixed_space: SearchSpace, log_step: LogStep) -> None:
    problem = Problem(mixed_space, sources=(source(mixed_space, log_step),))
    seen = [Observation(mixed_space.default, math.exp(log_step(mixed_space.default)))]
    for _ in range(4):
        suggestion = BayesianLearner().suggest(problem, seen, seed=0)
        assert suggestion is not None and suggestion.kind == "model"
        seen.append(Observation(suggestion.strategy, math.exp(log_step(suggestion.strategy))))


def test_initial_points_name_the_dropped_sources(
    mixed_space: SearchSpace, log_step: LogStep
) -> None:
    seen = [Observation(s, math.exp(log_step(s))) for s in spread(mixed_space, 5, seed=2)]

    def unrelated(strategy: Strategy) -> float:
        return 0.5 * int(strategy["streams"]) + (0.6 if strategy.get("torus") else 0.0)

    problem = Problem(mixed_space, sources=(source(mixed_space, unrelated),))
    suggestion = BayesianLearner().suggest(problem, seen, seed=0)
    assert suggestion is not None and suggestion.kind == "sobol"
    ((name, rise),) = suggestion.info["dropped"]
    assert name == "there" and rise >= 0.5


def test_a_gain_over_nothing_that_may_be_used_is_a_number(
    mixed_space: SearchSpace, log_step: LogStep
) -> None:
    default = Observation(mixed_space.default, math.exp(log_step(mixed_space.default)))
    problem = Problem(
        mixed_space,
        sources=(source(mixed_space, log_step),),
        feasible=lambda points: np.zeros(len(points)),
    )
    suggestion = BayesianLearner().suggest(problem, [default], seed=0)
    assert suggestion is not None and suggestion.kind == "model"
    json.dumps(suggestion.info, allow_nan=False)
    assert suggestion.info["expected_gain"] == 0.0


def test_a_task_that_helps_is_kept(mixed_space: SearchSpace, log_step: LogStep) -> None:
    problem = Problem(mixed_space, sources=(source(mixed_space, log_step),))
    seen = [Observation(s, math.exp(log_step(s))) for s in spread(mixed_space, 8, seed=2)]
    surrogate = fit(problem, seen)
    assert [prior.name for prior in surrogate.priors] == ["there"]
    unseen = spread(mixed_space, 60, seed=5)
    truth = np.array([log_step(s) for s in unseen])
    helped, alone = (
        float(np.abs(fit(p, seen).predict(unseen)[0] - truth).mean())
        for p in (problem, Problem(mixed_space))
    )
    assert helped < 0.5 * alone


def test_of_a_source_only_the_residual_of_the_cost_model_is_used(
    task: Task, space: SearchSpace
) -> None:
    """The source is the same task with a faster network; its cost model predicts its trials."""
    links = task.resources.links
    fast = Links(Link(4, 2e-3, 12.5e7 / 1.5), links.within, Link(2, 1e-3, 12.5e7))
    twin = Task(task.model, Resources(task.resources.hosts, "cpu", task.resources.build, fast))
    tried = spread(space, 30)
    seconds = CostModel(twin.model, twin.resources).predict(tried)
    seen = tuple(Observation(s, float(t)) for s, t in zip(tried, seconds, strict=True))
    problem = Problem(space, task, (Source("twin", twin, space, seen, 1.0),))
    default = [Observation(space.default, 1.0)]
    assert [prior.name for prior in fit(problem, default).priors] == ["cost model"]
    without = Problem(space, None, (replace(problem.sources[0], task=None),))
    assert [prior.name for prior in fit(without, default).priors] == ["twin"]


def test_a_source_that_contradicts_the_cost_model_starts_with_a_small_weight(
    task: Task, space: SearchSpace
) -> None:
    """A source like the target, whose step times are far from the cost model's."""
    predict = CostModel(task.model, task.resources).predict
    tried = spread(space, 30)
    seen = tuple(Observation(s, float(t) ** -3) for s, t in zip(tried, predict(tried), strict=True))
    some = spread(space, 100, seed=4)
    for known in (task, None):  # with its own cost model; with the target's subtracted
        problem = Problem(space, task, (Source("adversarial", known, space, seen, 0.9),))
        surrogate = fit(problem, [Observation(space.default, 1.0)])
        prior = surrogate.priors[-1]
        assert prior.name == "adversarial" and 0 < prior.prior_mean[0] < 0.3 * 0.9
        assert prior.prior_std == (SHIPPED.source_deviation,)
        assert rank_correlation(surrogate.predict(some)[0], predict(some)) > 0.9


def test_the_weight_of_a_plausible_source_stays(space: SearchSpace) -> None:
    """Up to twice the usual spread; beyond that the square of the ratio is the factor."""

    def varying(height: float) -> PriorFunction:
        return PriorFunction("x", lambda points: height * (points[:, :1] > 0.5), (0.8,), (0.4,))

    unit = float(varying(1.0).basis(sobol_points(space, 64, 0)).std())
    for height, share in ((0.05, 1.0), (0.2, 1.0), (0.4, 0.25), (1.0, 0.04)):
        discounted = discount_implausible(space, varying(height / unit), 0.1)
        assert discounted.prior_mean == pytest.approx((0.8 * share,))


def test_the_cost_model_does_not_count_twice(task: Task, space: SearchSpace) -> None:
    """A source with unmeasured links has no cost model: the target's is subtracted."""
    tried = spread(space, 40)
    seconds = CostModel(task.model, task.resources).predict(tried)
    seen = tuple(Observation(s, float(t)) for s, t in zip(tried, seconds, strict=True))
    problem = Problem(space, task, (Source("there", None, space, seen, 1.0),))
    some = spread(space, 50, seed=4)
    predicted = fit(problem, seen[:1]).predict(some)[0]
    truth = np.log(CostModel(task.model, task.resources).predict(some))
    assert predicted == pytest.approx(truth, abs=0.4)


def test_a_source_without_a_cost_model_says_nothing_of_what_it_has_not_tried(
    task: Task, space: SearchSpace
) -> None:
    """There the task's own cost model holds. One that only knows its default knows nothing."""
    default = Observation(space.default, 0.5)
    some = spread(space, 50, seed=4)
    alone = fit(Problem(space, task), [default]).predict(some)[0]
    assert np.ptp(alone) > 0.1
    source = Source("there", None, space, (default,), 1.0)
    beside = fit(Problem(space, task, (source,)), [default])
    assert beside.predict(some)[0] == pytest.approx(alone, abs=1e-6)
    assert [each.name for each in beside.priors] == ["cost model"]


def test_a_source_that_cannot_be_learned_from_is_left_out(task: Task, space: SearchSpace) -> None:
    strange = Observation(Strategy({"no such knob": 1}), 0.1)
    problem = Problem(space, task, (Source("strange", None, space, (strange,), 1.0),))
    assert [e.name for e in fit(problem, []).priors] == ["cost model"]
