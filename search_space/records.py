"""Records: dataclasses that are stored or sent as JSON; msgspec checks and converts what is read.

The JSON of a record has one entry for each field, in order. What is special about a field is in its
declaration:

- ``Real``: a number, which stays an integer if it is one;
- ``OrNan``, ``OrInf``: JSON's ``null`` stands for NaN, or for infinity;
- ``LEFT_OUT``: there is no entry where the field has its default, as in earlier versions;
- ``NOT_STORED``: there is no entry at all;
- a class with ``from_plain`` and ``to_plain``, or :func:`stored_as`, reads its own JSON.

msgspec is loaded when the first record is read, which only the driver does: it takes 12 ms, too
many for the start of a worker.
"""

from __future__ import annotations

import enum
import functools
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    Real = float
    OrNan = float
    OrInf = float
else:
    Real = int | float
    OrNan = int | float | None
    OrInf = int | float | None

LEFT_OUT: Mapping[str, str] = {"json": "left out at its default"}
NOT_STORED: Mapping[str, str] = {"json": "not stored"}

#: Numbers whose names end in these cannot be negative.
_NOT_NEGATIVE = ("_s", "_bytes", "_steps", "slots", "shape")
_POSITIVE = ("_per_s",)
_PLACE = re.compile(r"(?P<problem>.*?)(?: - at `\$(?P<path>[^`]*)`)?", re.DOTALL)
#: Errors of classes that read their own JSON.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
#: Types that msgspec knows, with all types in them.
_DESCRIBED: set[Any] = set()
#: One for all types, because two of them may have a third one in common.
_DESCRIBING = threading.Lock()

_Self = TypeVar("_Self", bound="Record")
_Value = TypeVar("_Value")


class UnknownFieldError(ValueError):
    """JSON has a field that its record has not, as where a newer version wrote it."""


class Record:
    """A dataclass with a JSON form; see the module's docstring."""

    def __post_init__(self) -> None:
        """Replace ``None``, as it is read, by what it stands for."""
        for name, number in _nulls_of(self).items():
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, number)
            elif isinstance(value, tuple) and None in value:
                replaced = tuple(number if each is None else each for each in value)
                object.__setattr__(self, name, replaced)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        nulls = _nulls_of(self)
        plain = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.metadata == NOT_STORED:
                continue
            if field.metadata == LEFT_OUT and _same(value, field.default):
                continue
            if field.name in nulls:
                value = _with_nulls(value)
            plain[field.name] = _plain(value)
        return plain

    @classmethod
    def from_json(cls: type[_Self], values: Mapping[str, Any]) -> _Self:
        """Return the record that :meth:`to_json` wrote.

        Raises:
            UnknownFieldError: ``values`` has further fields.
            ValueError: ``values`` is no such record; the message says where and why.
            SpaceError: A strategy or a space in it cannot be.
        """
        return read(cls, values)

    @classmethod
    def known(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of ``values``, as another version wrote them, that are fields.

        Raises:
            ValueError: ``values`` is no dictionary.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"{values!r:.60} is not a {cls.__name__}")
        names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if name in names}


def read(kind: type[_Value], values: Any) -> _Value:
    """Plain values as ``kind``, a dataclass or another type with all its parameters.

    Raises:
        UnknownFieldError: As of :meth:`Record.from_json`.
        ValueError: As of :meth:`Record.from_json`.
        SpaceError: As of :meth:`Record.from_json`.
    """
    import msgspec

    if kind not in _DESCRIBED:
        _describe(kind)
    try:
        value = msgspec.convert(values, kind, dec_hook=_read_own)
    except msgspec.ValidationError as error:
        raise ValueError(_explained(str(error), values, kind.__name__)) from None
    if is_dataclass(value):
        if unknown := _unknown_field(value, values):
            raise UnknownFieldError(unknown)
        if problem := _impossible_number(value):
            raise ValueError(problem)
    return value


def _describe(kind: type) -> None:
    """Let msgspec describe a type in one thread alone.

    It shows other threads a class that it has half described, and ends the process when they
    use it.
    """
    import msgspec

    with _DESCRIBING:
        if kind not in _DESCRIBED:
            msgspec.json.Decoder(kind)
            _DESCRIBED.add(kind)


class _Stored(type):
    """The class of types whose values are of another class, which reads its own JSON."""

    kind: type
    read: Callable[[Any], Any]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.kind)


def stored_as(kind: type, read: Callable[[Any], Any]) -> type:
    """Return the type of a field whose values ``read`` makes, and their ``to_json`` writes.

    Args:
        kind: The class of the values.
        read: Makes a value; any error says that the JSON is malformed.
    """
    return _Stored(kind.__name__, (), {"kind": kind, "read": staticmethod(read)})


def _read_own(kind: Any, value: Any) -> Any:
    read_it = kind.read if isinstance(kind, _Stored) else kind.from_plain
    try:
        return read_it(value)
    except _MALFORMED as error:
        raise ValueError(f"not a {kind.__name__}: {error!r:.200}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if hasattr(value, "to_plain"):
        return value.to_plain()
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if is_dataclass(value) and not hasattr(value, "to_json"):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value.to_json() if hasattr(value, "to_json") else value


def _with_nulls(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_with_nulls, value))
    return value if math.isfinite(value) else None


def _same(value: Any, default: Any) -> bool:
    return bool(value == default or (value != value and default != default))


def _nulls_of(record: Record) -> dict[str, float]:
    kind: type = type(record)
    return _numbers_of_null(kind)


@functools.cache
def _numbers_of_null(kind: type) -> dict[str, float]:
    """Field -> the number that ``null`` stands for, of fields that have one."""
    found = {}
    for field in fields(kind):
        for name, number in (("OrNan", math.nan), ("OrInf", math.inf)):
            if name in str(field.type):
                found[field.name] = number
    return found


def _explained(message: str, values: Any, kind: str) -> str:
    """Return an error of msgspec with the name of the field, and its value."""
    match = _PLACE.fullmatch(message)
    assert match is not None
    problem, path = match["problem"], match["path"] or ""
    place = path.lstrip(".") or kind
    if not problem.startswith("Expected"):
        return f"{place}: {problem}"
    value = values
    try:
        for name, index in re.findall(r"\.([^.\[]+)|\[(\d+)\]", path):
            value = value[name] if name else value[int(index)]
    except (LookupError, TypeError):
        return f"{place}: {problem}"
    shown = f"{value!r:.60}" if "[...]" not in path else "a value"
    return f"{place}: {shown} is wrong: {problem[0].lower()}{problem[1:]}"


def _unknown_field(record: Any, values: Any) -> str | None:
    """Return the field that a record has not, but the JSON that it was read from, if any."""
    if isinstance(record, tuple) and record and is_dataclass(record[0]):
        return _first(map(_unknown_field, record, values))
    reads_itself = hasattr(record, "to_json") and not isinstance(record, Record)
    if not is_dataclass(record) or reads_itself:
        return None
    names = [field.name for field in fields(record)]
    unknown = next((name for name in values if name not in names), None)
    if unknown is not None:
        return f"{type(record).__name__} has no field {unknown!r:.60}"
    return _first(_unknown_field(getattr(record, name), each) for name, each in values.items())


def _first(problems: Iterable[str | None]) -> str | None:
    return next((each for each in problems if each is not None), None)


def _impossible_number(record: object) -> str | None:
    """Return why a number in a record cannot be; ``None`` if all can."""
    for field in fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        name = field.name
        for each in value if isinstance(value, tuple) else (value,):
            if is_dataclass(each):
                problem = _impossible_number(each)
                if problem is not None:
                    return problem
            elif isinstance(each, (int, float)) and (
                (each < 0 and name.endswith(_NOT_NEGATIVE))
                or (each <= 0 and name.endswith(_POSITIVE))
            ):
                return f"{name}: {each!r} is impossible"
    return None
