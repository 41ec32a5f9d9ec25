"""A strategy: one assignment of values to knobs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.knobs import Value


class Strategy(Mapping[str, Value]):
    """An immutable, hashable mapping from knob name to value.

    An absent knob keeps the job's own value, so that the empty strategy is exactly the user's job.
    Knobs whose condition does not hold are absent, too, so that equivalent strategies are equal.

    Args:
        values: Knob name -> value. Order does not matter.
    """

    __slots__ = ("_items",)

    def __init__(self, values: Mapping[str, Value] | None = None) -> None:
        for name, value in (values or {}).items():
            if not isinstance(value, (bool, int, float, str)):
                raise SpaceError(
                    f"knob {name}: {value!r} is not a number, a flag or a word",
                    hint="Give a number, a flag or a word.",
                )
        self._items: tuple[tuple[str, Value], ...] = tuple(sorted((values or {}).items()))

    def __repr__(self) -> str:
        return f"Strategy({dict(self._items)!r})"

    def __getitem__(self, name: str) -> Value:
        for key, value in self._items:
            if key == name:
                return value
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and self.to_json() == other.to_json()

    def replacing(self, **values: Value) -> Strategy:
        """Return the strategy with some values replaced or added."""
        return Strategy({**self, **values})

    def to_plain(self) -> dict[str, Value]:
        """Return a plain dictionary."""
        return dict(self._items)

    @classmethod
    def from_plain(cls, values: Mapping[str, Value]) -> Strategy:
        """Return the strategy that :meth:`to_plain` has returned.

        Raises:
            ValueError: ``values`` is no dictionary.
            SpaceError: A value is not plain.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"{values!r:.60} is no dictionary of knobs and values")
        return cls(values)

    def to_json(self) -> str:
        """Return canonical JSON: sorted and compact; floats round-trip exactly."""
        return json.dumps(dict(self._items), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Strategy:
        """Return the strategy that :meth:`to_json` has written.

        Raises:
            SpaceError: ``text`` is not a JSON object of plain values.
        """
        try:
            values: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise SpaceError(
                f"not a strategy: {error}", hint="Give a JSON object of knob names and values."
            ) from None
        if not isinstance(values, dict):
            raise SpaceError(
                f"not a strategy: {text[:40]!r}",
                hint="Give a JSON object of knob names and values.",
            )
        return cls(values)
