"""Strategies: equality and JSON."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space import Strategy

VALUES = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)


@given(values=st.dictionaries(st.text(min_size=1, max_size=8), VALUES, max_size=6))
def test_json_loses_nothing(values: dict[str, object]) -> None:
    strategy = Strategy(values)  # type: ignore[arg-type]
    again = Strategy.from_json(strategy.to_json())
    assert again == strategy
    assert {k: (type(v), v) for k, v in again.items()} == {
        k: (type(v), v) for k, v in values.items()
    }


def test_order_does_not_matter() -> None:
    one, other = Strategy({"a": 1, "b": 2}), Strategy({"b": 2, "a": 1})
    assert one == other and hash(one) == hash(other)


def test_flags_and_numbers_differ() -> None:
    assert Strategy({"a": True}) != Strategy({"a": 1})


@pytest.mark.parametrize("text", ["", "[]", "3", '{"a": [1]}', '{"a": null}', "{'a': 1}"])
def test_what_is_no_strategy_is_refused(text: str) -> None:
    with pytest.raises(SpaceError):
        Strategy.from_json(text)
