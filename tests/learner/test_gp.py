from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from linear_operator.utils.errors import NotPSDError

from hvd_autosync.learner import Observation, fit, gp
from hvd_autosync.learner.points import encode_all, sobol_points
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace, Strategy

Tell = Callable[..., Observation]


def strategies(space: SearchSpace, count: int, seed: int = 0) -> list[Strategy]:
    return [space.decode(point) for point in sobol_points(space, count, seed)]


def test_predictions_have_calibrated_errors(
    mixed_space: SearchSpace, log_step: Callable[[Strategy], float], tell: Tell
) -> None:
    surrogate = fit(Problem(mixed_space), [tell(s) for s in strategies(mixed_space, 60)])
    unseen = strategies(mixed_space, 100, seed=9)
    truth = np.array([log_step(s) for s in unseen])
    mean, deviation = surrogate.predict(unseen)
    error = mean - truth
    assert np.sqrt(np.mean(error**2)) < 0.4 * truth.std()
    assert np.mean(np.abs(error) < 2 * deviation) > 0.8
    assert np.sqrt(np.mean(error**2)) > 0.4 * deviation.mean()


def test_milliseconds_or_seconds_are_the_same_model(mixed_space: SearchSpace, tell: Tell) -> None:
    seen = [tell(s) for s in strategies(mixed_space, 20)]
    scaled = [Observation(o.strategy, 1000 * (o.step_s or 0)) for o in seen]
    queries = strategies(mixed_space, 5, seed=1)
    mean, deviation = fit(Problem(mixed_space), seen).predict(queries)
    mean_ms, deviation_ms = fit(Problem(mixed_space), scaled).predict(queries)
    assert mean_ms - mean == pytest.approx(math.log(1000), abs=1e-3)
    assert deviation_ms == pytest.approx(deviation, rel=1e-2)


def test_off_and_on_at_the_default_may_differ(mixed_space: SearchSpace, tell: Tell) -> None:
    """Between no group and one group there is a step, though both fuse by default."""
    rng = np.random.default_rng(0)
    seen = []
    for _ in range(12):
        for groups, fuse, cost in ((0, True, 0.3), (1, True, 0.0), (1, False, 0.0)):
            strategy = mixed_space.complete(
                {"groups": groups, "group_fusion": fuse} if groups else {"groups": 0}
            )
            seen.append(Observation(strategy, math.exp(cost + 0.01 * rng.standard_normal())))
    surrogate = fit(Problem(mixed_space), seen)
    off, on = surrogate.predict([mixed_space.default, mixed_space.complete({"groups": 1})])[0]
    assert off - on > 0.2


def test_repetitions_make_sure(mixed_space: SearchSpace, tell: Tell) -> None:
    seen = [tell(s) for s in strategies(mixed_space, 10)]
    target = seen[0].strategy
    again = [tell(target, seed=seed) for seed in range(1, 9)]
    once = fit(Problem(mixed_space), seen).predict([target])[1][0]
    often = fit(Problem(mixed_space), [*seen, *again]).predict([target])[1][0]
    assert often < 0.8 * once


def test_a_noisy_observation_has_less_weight(mixed_space: SearchSpace) -> None:
    problem = Problem(mixed_space)
    outlier, _other = strategies(mixed_space, 2)
    rest = [Observation(s, 1.0, 0.01) for s in strategies(mixed_space, 10, seed=3)]
    means = [
        fit(problem, [*rest, Observation(outlier, 0.5, error)]).predict([outlier])[0][0]
        for error in (0.0, 0.25)
    ]
    assert means[0] < means[1] - 0.05


def test_failures_say_nothing_of_times(mixed_space: SearchSpace, tell: Tell) -> None:
    seen = [tell(s) for s in strategies(mixed_space, 10)]
    failed = [Observation(s, None) for s in strategies(mixed_space, 5, seed=4)]
    queries = strategies(mixed_space, 4, seed=2)
    with_them, without = (fit(Problem(mixed_space), data) for data in ([*seen, *failed], seen))
    assert np.array_equal(with_them.predict(queries), without.predict(queries))


def test_the_mean_alone_is_the_posterior_mean(mixed_space: SearchSpace, tell: Tell) -> None:
    surrogate = fit(Problem(mixed_space), [tell(s) for s in strategies(mixed_space, 15)])
    points = encode_all(mixed_space, strategies(mixed_space, 6, seed=2))
    assert surrogate.mean_at(points) == pytest.approx(surrogate.joint_at(points)[0], abs=1e-6)


def test_deviations_are_those_of_the_joint_posterior(mixed_space: SearchSpace, tell: Tell) -> None:
    surrogate = fit(Problem(mixed_space), [tell(s) for s in strategies(mixed_space, 15)])
    queries = strategies(mixed_space, 4, seed=2)
    mean, covariance = surrogate.joint([*queries, queries[0]])
    assert surrogate.predict(queries)[0] == pytest.approx(mean[:4])
    assert surrogate.predict(queries)[1] == pytest.approx(np.sqrt(np.diag(covariance))[:4])
    assert covariance[0, 4] == pytest.approx(covariance[0, 0], abs=1e-6)  # it is the same strategy


def test_without_observations_it_is_the_prior(mixed_space: SearchSpace) -> None:
    mean, deviation = fit(Problem(mixed_space), []).predict([mixed_space.default])
    assert mean[0] == pytest.approx(0.0)
    assert deviation[0] > 0.1


@pytest.mark.parametrize(
    "steps",
    [
        [0.1],
        [0.1] * 6,
        [None] * 6,
        [math.nan, math.inf, -1.0, 0.0, 0.2, None],
        [1e-9, 1e9, 1e-9, 1e9, 1.0, 1e9],
    ],
)
def test_odd_data_gives_finite_answers(mixed_space: SearchSpace, steps: list[float | None]) -> None:
    tried = strategies(mixed_space, len(steps))
    seen = [Observation(s, step) for s, step in zip(tried, steps, strict=True)]
    surrogate = fit(Problem(mixed_space), seen * 3)
    mean, deviation = surrogate.predict(tried)
    assert np.isfinite(mean).all()
    assert np.isfinite(deviation).all() and (deviation >= 0).all()


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failing_fit_is_retried_and_then_done_without(
    mixed_space: SearchSpace, tell: Tell, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    calls = []
    original = gp.fit_gpytorch_mll_scipy

    def failing(*args, **kwargs):  # type: ignore[no-untyped-def]
        calls.append(1)
        if len(calls) <= failures:
            for parameter in args[0].parameters():
                parameter.data.fill_(math.nan)
            raise NotPSDError("not positive definite")
        return original(*args, **kwargs)

    monkeypatch.setattr(gp, "fit_gpytorch_mll_scipy", failing)
    seen = [tell(s) for s in strategies(mixed_space, 6)]
    surrogate = fit(Problem(mixed_space), seen)
    assert len(calls) == 2
    assert np.isfinite(surrogate.predict([mixed_space.default])).all()


def test_only_what_numbers_cause_is_done_without(
    mixed_space: SearchSpace, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("element 0 of tensors does not require grad")

    monkeypatch.setattr(gp, "fit_gpytorch_mll_scipy", failing)
    with pytest.raises(RuntimeError, match="require grad"):
        fit(Problem(mixed_space), [tell(s) for s in strategies(mixed_space, 6)])


def test_a_space_without_free_knobs_has_a_model() -> None:
    space = SearchSpace(())
    mean, _ = fit(Problem(space), [Observation(Strategy(), 0.5)] * 3).predict([Strategy()])
    assert mean[0] == pytest.approx(math.log(0.5), abs=0.05)
