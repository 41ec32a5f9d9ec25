from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_autosync.errors import SpaceError
from hvd_autosync.learner.points import (
    discretize,
    distinct,
    encode_all,
    every_point,
    keys,
    sobol_points,
    spread,
)
from hvd_autosync.search_space import Condition, SearchSpace, Strategy
from hvd_autosync.search_space.conditions import active
from hvd_autosync.search_space.knobs import categorical_knob, float_knob, integer_knob


def row_by_row(space: SearchSpace, points: np.ndarray) -> np.ndarray:
    """The definition of discretizing."""
    return encode_all(space, [space.decode(point) for point in points])


def test_discretizing_decodes_and_encodes_each_row(mixed_space: SearchSpace) -> None:
    points = np.random.default_rng(0).random((200, mixed_space.dimension))
    assert np.array_equal(discretize(mixed_space, points), row_by_row(mixed_space, points))


def test_discretized_points_are_strategies_and_back(mixed_space: SearchSpace) -> None:
    points = sobol_points(mixed_space, 64, seed=1)
    strategies = [mixed_space.decode(point) for point in points]
    assert keys(encode_all(mixed_space, strategies)) == keys(points)


def test_a_default_of_many_digits_is_discretized() -> None:
    """As a bound of a space file; else its neighbors would differ from it in two knobs."""
    knob = float_knob("cycle", 0.05, 100.0, 0.1, help="", scale="log").restrict(0.123456, 10)
    space = SearchSpace((knob,))
    default = encode_all(space, [space.default])
    assert np.array_equal(discretize(space, default), default)
    assert space.decode(default[0]) == space.default
    assert space.default["cycle"] == 0.123456


def test_a_default_that_is_no_multiple_is_discretized() -> None:
    space = SearchSpace((integer_knob("i", 0, 20, 5, help="", multiple=10),))
    default = encode_all(space, [space.default])
    assert np.array_equal(discretize(space, default), default)
    assert space.decode(default[0]) == space.default
    points = every_point(space)
    assert points is not None
    assert [space.decode(point)["i"] for point in points] == [0, 5, 10, 20]


def test_active_tells_which_knobs_matter(mixed_space: SearchSpace) -> None:
    points = discretize(mixed_space, np.random.default_rng(0).random((50, mixed_space.dimension)))
    holds = active(mixed_space, points)
    names = [knob.name for knob in mixed_space.knobs]
    for point, row in zip(points, holds, strict=True):
        assert {n for n, on in zip(names, row, strict=True) if on} == set(mixed_space.decode(point))


def test_conditions_on_held_knobs_hold_or_not() -> None:
    child = categorical_knob("b", (1, 2), 1, help="", condition=Condition("a", (True,)))
    points = np.array([[0.0], [1.0]])
    for held in (True, False):
        space = SearchSpace((child,), (("a", held),))
        assert active(space, points).tolist() == [[held], [held]]
        assert np.array_equal(discretize(space, points), row_by_row(space, points))


def test_a_codec_switches_lossless_codes_off() -> None:
    exchange = categorical_knob("w_exchange", ("allreduce", "factors"), "allreduce", help="")
    lossless = categorical_knob("w_lossless", (False, True), False, help="")
    coded = Condition("w_exchange", ("allreduce",))
    codec = categorical_knob("w_codec", ("none", "int8"), "none", help="", condition=coded)
    space = SearchSpace((exchange, lossless, codec))
    points = np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert active(space, points)[:, 1].tolist() == [True, False, True]
    assert np.array_equal(discretize(space, points), row_by_row(space, points))
    for held in ("none", "int8"):
        space = SearchSpace((lossless,), (("w_codec", held),))
        assert active(space, np.ones((1, 1))).tolist() == [[held == "none"]]


def test_a_switched_off_parent_switches_its_children_off() -> None:
    space = SearchSpace(
        (
            categorical_knob("a", (False, True), False, help=""),
            categorical_knob("b", (False, True), True, help="", condition=Condition("a", (True,))),
            categorical_knob("c", (False, True), False, help="", condition=Condition("b", (True,))),
        )
    )
    points = np.array([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert active(space, points).tolist() == [[True, False, False], [True, True, True]]
    assert np.array_equal(discretize(space, points), row_by_row(space, points))


def test_every_choice_has_an_equal_share() -> None:
    space = SearchSpace((categorical_knob("c", ("x", "y", "z"), "x", help=""),))
    column = spread(space, np.random.default_rng(0).random((3000, 1)))[:, 0]
    shares = [float(np.mean(column == position)) for position in (0.0, 0.5, 1.0)]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.04)


def test_every_point_of_a_small_space(tiny_space: SearchSpace) -> None:
    points = every_point(tiny_space)
    assert points is not None
    assert len({tiny_space.decode(point) for point in points}) == len(points) == 9


def test_every_point_knows_integers_and_fixed_knobs() -> None:
    space = SearchSpace(
        (integer_knob("i", 1, 11, 1, help="", multiple=4), float_knob("f", 2.0, 2.0, 2.0, help=""))
    )
    points = every_point(space)
    assert points is not None
    assert [space.decode(point)["i"] for point in points] == [1, 4, 8, 11]


@pytest.mark.parametrize(
    "knob", [float_knob("f", 0.0, 1.0, 0.5, help=""), integer_knob("i", 0, 1 << 30, 0, help="")]
)
def test_large_spaces_are_not_enumerated(knob) -> None:  # type: ignore[no-untyped-def]
    assert every_point(SearchSpace((knob,))) is None


def test_sobol_points_follow_from_the_seed(mixed_space: SearchSpace) -> None:
    first = sobol_points(mixed_space, 16, seed=3)
    assert np.array_equal(first, sobol_points(mixed_space, 32, seed=3)[:16])
    assert not np.array_equal(first, sobol_points(mixed_space, 16, seed=4))


def test_sobol_points_do_not_follow_from_the_default_type(mixed_space: SearchSpace) -> None:
    first = sobol_points(mixed_space, 16, seed=3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert np.array_equal(first, sobol_points(mixed_space, 16, seed=3))
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_distinct_keeps_the_order(tiny_space: SearchSpace) -> None:
    points = every_point(tiny_space)
    assert points is not None
    doubled = np.concatenate([points, points])
    left = distinct(doubled, keys(points[:2]))
    assert np.array_equal(left, points[2:])


def test_strategies_of_another_space_are_refused(tiny_space: SearchSpace) -> None:
    with pytest.raises(SpaceError):
        encode_all(tiny_space, [Strategy({"elsewhere": 1})])
