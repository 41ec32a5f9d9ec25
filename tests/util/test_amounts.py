"""Amounts in messages."""

from __future__ import annotations

import pytest

from hvd_autosync.util.amounts import amount


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
