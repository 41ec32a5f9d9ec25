"""Amounts in messages."""

from __future__ import annotations

import pytest

from hvd_autosync.util.amounts import amount, be, four_digits


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 minutes"),
        (1, "1 minute"),
        (2, "2 minutes"),
        (1.0, "1 minute"),
        (0.5, "0.5 minutes"),
        (1_000_000, "1000000 minutes"),
    ],
)
def test_one_is_singular(number: float, text: str) -> None:
    assert amount(number, "minute") == text


@pytest.mark.parametrize(
    ("number", "thing", "text"),
    [(1, "study", "1 study"), (2, "study", "2 studies"), (2, "day", "2 days"), (0, "y", "0 ys")],
)
def test_a_plural_may_end_in_ies(number: float, thing: str, text: str) -> None:
    assert amount(number, thing) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.5, "0.5"), (75.0, "75"), (999.96, "1000"), (1234.5, "1234"), (36004.2, "36004")],
)
def test_a_large_number_has_no_exponent(number: float, text: str) -> None:
    assert four_digits(number) == text


def test_the_verb_fits_the_number() -> None:
    assert [be(number) for number in (0, 1, 2)] == ["are", "is", "are"]
    assert [be(number, past=True) for number in (0, 1, 2)] == ["were", "was", "were"]
