from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from hvd_autosync.errors import SpaceError
from hvd_autosync.learner import Observation, fit, knob_effects
from hvd_autosync.learner.points import sobol_points
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace, Strategy

Tell = Callable[..., Observation]


@pytest.fixture
def seen(mixed_space: SearchSpace, tell: Tell) -> list[Observation]:
    return [tell(mixed_space.decode(point)) for point in sobol_points(mixed_space, 60, seed=0)]


def test_effects_have_the_right_sign_and_size(
    mixed_space: SearchSpace, seen: list[Observation]
) -> None:
    winner = mixed_space.complete({"codec": "fp16", "hierarchical": True, "streams": 3})
    effects = {effect.name: effect for effect in knob_effects(Problem(mixed_space), seen, winner)}
    assert set(effects) == {"codec", "hierarchical", "streams"}
    assert effects["codec"].ratio == pytest.approx(math.exp(-0.2), abs=0.08)
    assert effects["hierarchical"].ratio == pytest.approx(math.exp(-0.25), abs=0.08)
    assert effects["codec"].high < 1 and effects["hierarchical"].high < 1
    assert effects["streams"].low < 1 < effects["streams"].high  # it does nothing
    for effect in effects.values():
        assert effect.low < effect.ratio < effect.high
        assert effect.default == mixed_space.default[effect.name]
        assert effect.chosen == winner[effect.name]


def test_the_largest_gain_comes_first(mixed_space: SearchSpace, seen: list[Observation]) -> None:
    winner = mixed_space.complete({"codec": "int8", "hierarchical": True})
    effects = knob_effects(Problem(mixed_space), seen, winner)
    assert [effect.name for effect in effects] == ["hierarchical", "codec"]
    assert effects[1].ratio > 1  # int8 hurts


def test_a_dependent_knob_is_compared_with_its_own_default(
    mixed_space: SearchSpace, seen: list[Observation]
) -> None:
    winner = mixed_space.complete({"groups": 4, "group_fusion": False})
    effects = {effect.name: effect for effect in knob_effects(Problem(mixed_space), seen, winner)}
    assert set(effects) == {"groups", "group_fusion"}
    assert (effects["group_fusion"].default, effects["group_fusion"].chosen) == (True, False)
    assert effects["group_fusion"].ratio < 1
    # Switched on but at its default, it is part of its parent's effect.
    fused = mixed_space.complete({"groups": 4})
    assert [effect.name for effect in knob_effects(Problem(mixed_space), seen, fused)] == ["groups"]


def test_little_data_is_a_wide_interval(mixed_space: SearchSpace, seen: list[Observation]) -> None:
    winner = mixed_space.complete({"codec": "fp16"})
    few, many = (knob_effects(Problem(mixed_space), data, winner)[0] for data in (seen[:4], seen))
    assert many.high - many.low < 0.7 * (few.high - few.low)


def test_the_interval_is_that_of_joint_samples(
    mixed_space: SearchSpace, seen: list[Observation]
) -> None:
    winner = mixed_space.complete({"codec": "fp16", "streams": 3})
    effects = knob_effects(Problem(mixed_space), seen[:20], winner)
    effect = next(e for e in effects if e.name == "streams")
    surrogate = fit(Problem(mixed_space), seen[:20])
    mean, covariance = surrogate.joint([winner, winner.replacing(streams=1)])
    rng = np.random.default_rng(0)
    samples = rng.multivariate_normal(mean, covariance, 40_000, check_valid="ignore")
    ratios = np.exp(samples[:, 0] - samples[:, 1])
    assert [effect.low, effect.ratio, effect.high] == pytest.approx(
        np.quantile(ratios, [0.05, 0.5, 0.95]), abs=0.003
    )


def test_the_default_has_no_effects(mixed_space: SearchSpace, seen: list[Observation]) -> None:
    assert knob_effects(Problem(mixed_space), seen, mixed_space.default) == []
    assert knob_effects(Problem(mixed_space), seen, Strategy()) == []


def test_a_winner_of_another_space_is_refused(mixed_space: SearchSpace) -> None:
    with pytest.raises(SpaceError):
        knob_effects(Problem(mixed_space), [], Strategy({"elsewhere": 1}))
