"""Knobs: domains, scales, round trips, restrictions."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.catalogue import CATALOGUE, catalogue_knob
from hvd_autosync.search_space.knobs import (
    categorical_knob,
    float_knob,
    integer_knob,
    knob_from_json,
    knob_to_json,
)


@given(position=st.floats(0, 1), index=st.integers(0, len(CATALOGUE) - 1))
def test_every_position_decodes_to_a_value_of_the_domain_that_encodes_to_itself(
    position: float, index: int
) -> None:
    knob = CATALOGUE[index]
    value = knob.from_unit(position)
    knob.validate(value)
    assert 0 <= knob.to_unit(value) <= 1
    assert knob.from_unit(knob.to_unit(value)) == value


def test_ends_of_the_unit_interval_are_the_bounds() -> None:
    assert catalogue_knob("fusion_threshold_bytes").from_unit(0.0) == 0
    assert catalogue_knob("fusion_threshold_bytes").from_unit(1.0) == 256 * 2**20
    assert catalogue_knob("cycle_time_ms").from_unit(0.0) == 0.1
    assert catalogue_knob("cycle_time_ms").from_unit(1.0) == 100.0


def test_a_log_scale_gives_equal_factors_equal_distances() -> None:
    low, middle, high = (catalogue_knob("cycle_time_ms").to_unit(v) for v in (0.1, 1.0, 10.0))
    assert math.isclose(middle - low, high - middle)


def test_integer_values_are_multiples() -> None:
    assert catalogue_knob("fusion_threshold_bytes").from_unit(0.3) % (64 * 1024) == 0


@pytest.mark.parametrize("value", [True, "fast", math.nan, math.inf, 0.05, 101])
def test_values_outside_the_domain_are_named(value: object) -> None:
    with pytest.raises(SpaceError, match="cycle_time_ms") as caught:
        catalogue_knob("cycle_time_ms").validate(value)  # type: ignore[arg-type]
    assert "0.1 to 100 ms" in caught.value.hint


def test_integers_refuse_fractions() -> None:
    with pytest.raises(SpaceError, match="whole number"):
        integer_knob("n", 0, 4, 0, help="").validate(1.5)


def test_categories_tell_numbers_from_flags() -> None:
    knob = categorical_knob("cache", (0, 1), 0, help="")
    knob.validate(1)
    with pytest.raises(SpaceError, match="not one of its choices"):
        knob.validate(True)


def test_bounds_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(SpaceError, match="above upper bound"):
        float_knob("x", 2.0, 1.0, 1.5, help="")


@pytest.mark.parametrize(
    ("low", "high", "scale", "multiple", "named"),
    [
        (0, math.inf, "linear", 1, "bound inf"),
        (math.nan, 8, "linear", 1, "bound nan"),
        ("0", 8, "linear", 1, "bound '0'"),
        (0, 8, "cubic", 1, "'cubic'"),
        (0, 8, "linear", 0, "multiple 0"),
        (0, 8, "linear", -2, "multiple -2"),
    ],
)
def test_impossible_declarations_are_named(
    low: Any, high: Any, scale: Any, multiple: int, named: str
) -> None:
    with pytest.raises(SpaceError, match=named):
        integer_knob("a", low, high, 1, help="", scale=scale, multiple=multiple)


def test_one_text_is_no_list_of_choices() -> None:
    with pytest.raises(SpaceError, match="are one text, 'ring'"):
        categorical_knob("a", "ring", "r", help="")


def test_a_log_scale_without_offset_cannot_contain_zero() -> None:
    with pytest.raises(SpaceError, match="log scale"):
        float_knob("x", 0.0, 1.0, 0.5, help="", scale="log")


def test_restricting_moves_the_default_inside() -> None:
    knob = catalogue_knob("cycle_time_ms").restrict(5, 10)
    assert (knob.low, knob.high, knob.default) == (5, 10, 5)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("fusion_threshold_bytes", 0, 67_000_000),
        ("fusion_threshold_bytes", 200_000_001, 1 << 28),
        ("cycle_time_ms", 5, 10),
    ],
)
def test_a_default_on_a_bound_is_decoded_as_it_is(name: str, low: int, high: int) -> None:
    knob = catalogue_knob(name).restrict(low, high)
    decoded = knob.from_unit(knob.to_unit(knob.default))
    assert decoded == knob.default and type(decoded) is type(knob.default)
    assert {knob.from_unit(0.0), knob.from_unit(1.0)} == {knob.low, knob.high}


@pytest.mark.parametrize(("low", "high"), [(200, 300), (3, 2), (0.001, 0.01)])
def test_bounds_that_leave_nothing_are_refused(low: float, high: float) -> None:
    with pytest.raises(SpaceError, match="leave nothing"):
        catalogue_knob("cycle_time_ms").restrict(low, high)


@pytest.mark.parametrize("knob", CATALOGUE, ids=lambda knob: knob.name)
def test_json_round_trip(knob: object) -> None:
    assert knob_from_json(knob_to_json(knob)) == knob  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{}, {"kind": "complex"}, {"kind": "float"}])
def test_what_is_no_knob_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(SpaceError, match="not a knob"):
        knob_from_json(fields)
