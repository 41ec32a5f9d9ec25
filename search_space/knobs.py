"""Knobs: parameters of a strategy, each with its domain, scale, unit and default.

There are three kinds: :class:`FloatKnob`, :class:`IntegerKnob` and :class:`CategoricalKnob` (a flag
has the choices ``False`` and ``True``). A knob maps its domain to the unit interval and back, so
that learners work in the unit cube.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.records import Real, read

Value: TypeAlias = bool | int | float | str
Scale: TypeAlias = Literal["linear", "log"]

#: Groups of exact knobs, and groups of lossy knobs, which are tuned only if the user allows it.
EXACT_GROUPS = ("horovod", "transport", "exchange")
LOSSY_GROUPS = ("codec", "order", "schedule")

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Condition:
    """The condition that another knob has one of some values."""

    knob: str
    values: tuple[Value, ...]

    def holds(self, values: Mapping[str, Value]) -> bool:
        """Return whether ``values`` (knob name -> value) fulfil the condition."""
        return self.knob in values and values[self.knob] in self.values


@dataclass(frozen=True)
class _Common:
    """The attributes of every kind of knob.

    Attributes:
        name: Name in strategies, files and reports.
        help: One sentence for users.
        group: Group of the knob; lossy groups are opt-in.
        exact: Whether the knob changes training at most by the order of floating-point additions.
        unit: Unit of the values (``"B"``, ``"ms"``), or "".
        condition: Condition under which the knob has an effect; ``None``: always.
    """

    name: str
    help: str
    group: str
    exact: bool
    unit: str
    condition: Condition | None


@dataclass(frozen=True)
class _Numeric(_Common):
    low: Real
    high: Real
    default: Real
    scale: Scale
    #: Added before the logarithm, so that a log scale can contain 0.
    log_offset: Real

    def __post_init__(self) -> None:
        for bound in (self.low, self.high):
            if not isinstance(bound, (int, float)) or not abs(bound) < math.inf:
                raise SpaceError(
                    f"knob {self.name}: bound {bound!r} is not a finite number",
                    hint="Give numbers for low and high.",
                )
        if self.scale not in ("linear", "log"):
            raise SpaceError(
                f"knob {self.name}: unknown scale {self.scale!r}", hint="Choose linear or log."
            )
        if not self.low <= self.high:
            raise SpaceError(
                f"knob {self.name}: lower bound {self.low} is above upper bound {self.high}",
                hint="Give bounds with low <= high.",
            )
        if self.scale == "log" and self.low + self.log_offset <= 0:
            raise SpaceError(
                f"knob {self.name}: a log scale cannot contain {self.low}",
                hint="Raise the lower bound above 0.",
            )
        self.validate(self.default)

    def _scaled(self, value: float) -> float:
        return math.log(value + self.log_offset) if self.scale == "log" else value

    def to_unit(self, value: Value) -> float:
        """Return the position of ``value`` in [0, 1] on this knob's scale."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        return 0.0 if high == low else (self._scaled(float(value)) - low) / (high - low)

    def _from_scaled(self, position: float) -> float:
        low, high = self._scaled(self.low), self._scaled(self.high)
        scaled = low + min(max(position, 0.0), 1.0) * (high - low)
        value = math.exp(scaled) - self.log_offset if self.scale == "log" else scaled
        return min(max(value, self.low), self.high)

    def validate(self, value: Value) -> None:
        """Raise :class:`SpaceError` unless ``value`` lies in the domain."""
        if isinstance(value, str) or type(value) not in (int, float) or not abs(value) < math.inf:
            raise SpaceError(f"knob {self.name}: {value!r} is not a number", hint=self._domain())
        if not self.low <= value <= self.high:
            raise SpaceError(f"knob {self.name}: {value!r} is out of bounds", hint=self._domain())

    def _domain(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return f"Choose a value from {self.low:g} to {self.high:g}{unit}."

    def format(self, value: Value) -> str:
        """Return ``value`` with its unit, for users.

        A text, which another library understands, is returned as it is.
        """
        if isinstance(value, str):
            return value
        return _mebibytes(value) if self.unit == "B" else f"{value:.4g} {self.unit}".rstrip()


@dataclass(frozen=True)
class FloatKnob(_Numeric):
    """A real-valued knob; decoded values have four significant digits, or are the default."""

    def from_unit(self, position: float) -> float:
        """Return the value at ``position`` in [0, 1]."""
        if position == self.to_unit(self.default):  # which may be a bound of more digits
            return float(self.default)
        value = float(f"{self._from_scaled(position):.4g}")
        return min(max(value, self.low), self.high)

    def restrict(self, low: float, high: float) -> FloatKnob:
        """Return the knob on the intersection of [low, high] with its domain."""
        low, high = map(float, _intersection(self, low, high))
        return replace(self, low=low, high=high, default=min(max(self.default, low), high))


@dataclass(frozen=True)
class IntegerKnob(_Numeric):
    """A whole-numbered knob; decoded values are multiples, bounds or the default."""

    multiple: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.multiple) is not int or self.multiple < 1:
            raise SpaceError(
                f"knob {self.name}: multiple {self.multiple!r} is not a whole number above 0",
                hint="Give 1, or the number that divides all values.",
            )

    def validate(self, value: Value) -> None:
        """Raise :class:`SpaceError` unless ``value`` is a whole number in the domain."""
        super().validate(value)
        if not isinstance(value, int):
            raise SpaceError(
                f"knob {self.name}: {value!r} is not a whole number", hint=self._domain()
            )

    def from_unit(self, position: float) -> int:
        """Return the value at ``position`` in [0, 1]: the default, nearest multiple or bound."""
        if position == self.to_unit(self.default):  # which need not be a multiple
            return int(self.default)
        exact = self._from_scaled(position)
        value = round(exact / self.multiple) * self.multiple
        inside = min(max(value, self.low), self.high)
        return int(min((inside, self.low, self.high), key=lambda each: abs(each - exact)))

    def restrict(self, low: float, high: float) -> IntegerKnob:
        """Return the knob on the intersection of [low, high] with its domain."""
        low, high = _intersection(self, math.ceil(low), math.floor(high))
        return replace(
            self, low=int(low), high=int(high), default=int(min(max(self.default, low), high))
        )


@dataclass(frozen=True)
class CategoricalKnob(_Common):
    """A knob with a few unordered choices."""

    choices: tuple[Value, ...]
    default: Value

    def __post_init__(self) -> None:
        if not self.choices:
            raise SpaceError(
                f"knob {self.name}: no choice is left", hint="Allow at least one choice."
            )
        self.validate(self.default)

    def to_unit(self, value: Value) -> float:
        """Return the position of ``value`` in [0, 1]; the choices are equally spaced."""
        return self._index(value) / max(len(self.choices) - 1, 1)

    def from_unit(self, position: float) -> Value:
        """Return the choice nearest to ``position``; outer choices have half a share of [0, 1]."""
        count = len(self.choices)
        return self.choices[min(round(min(max(position, 0.0), 1.0) * (count - 1)), count - 1)]

    def _index(self, value: Value) -> int:
        for index, choice in enumerate(self.choices):
            if type(choice) is type(value) and choice == value:
                return index
        raise SpaceError(
            f"knob {self.name}: {value!r} is not one of its choices",
            hint=f"Choose one of {', '.join(map(str, self.choices))}.",
        )

    def validate(self, value: Value) -> None:
        """Raise :class:`SpaceError` unless ``value`` is one of the choices."""
        self._index(value)

    def restrict(self, choices: Sequence[Value]) -> CategoricalKnob:
        """Return the knob with only some of its choices."""
        for choice in choices:
            self.validate(choice)
        kept = tuple(choice for choice in self.choices if choice in choices)
        default = self.default if self.default in kept or not kept else kept[0]
        return replace(self, choices=kept, default=default)

    def format(self, value: Value) -> str:
        """Return ``value`` for users; flags are "on" and "off"."""
        if isinstance(value, bool):
            return "on" if value else "off"
        if self.unit == "B" and isinstance(value, int):
            return _mebibytes(value)
        return str(value)


def _mebibytes(size_bytes: float) -> str:
    return f"{size_bytes / _MIB:.4g} MiB"


Knob: TypeAlias = FloatKnob | IntegerKnob | CategoricalKnob


def _intersection(knob: FloatKnob | IntegerKnob, low: float, high: float) -> tuple[float, float]:
    """Return the intersection of [low, high] with the knob's domain.

    Raises:
        SpaceError: The intersection is empty.
    """
    if low > high or high < knob.low or low > knob.high:
        raise SpaceError(
            f"knob {knob.name}: bounds {low:g} to {high:g} leave nothing of its domain",
            hint=f"Choose bounds within {knob.low:g} to {knob.high:g}.",
        )
    return max(low, knob.low), min(high, knob.high)


def float_knob(
    name: str,
    low: float,
    high: float,
    default: float,
    *,
    help: str,
    group: str = "horovod",
    exact: bool = True,
    unit: str = "",
    scale: Scale = "linear",
    log_offset: float = 0.0,
    condition: Condition | None = None,
) -> FloatKnob:
    """Declare a real-valued knob."""
    return FloatKnob(
        name, help, group, exact, unit, condition, low, high, default, scale, log_offset
    )


def integer_knob(
    name: str,
    low: int,
    high: int,
    default: int,
    *,
    help: str,
    group: str = "horovod",
    exact: bool = True,
    unit: str = "",
    scale: Scale = "linear",
    log_offset: float = 0.0,
    multiple: int = 1,
    condition: Condition | None = None,
) -> IntegerKnob:
    """Declare a whole-numbered knob."""
    return IntegerKnob(
        name, help, group, exact, unit, condition, low, high, default, scale, log_offset, multiple
    )


def categorical_knob(
    name: str,
    choices: Sequence[Value],
    default: Value,
    *,
    help: str,
    group: str = "horovod",
    exact: bool = True,
    unit: str = "",
    condition: Condition | None = None,
) -> CategoricalKnob:
    """Declare a knob with choices; a flag has the choices ``False`` and ``True``.

    Raises:
        SpaceError: There are no choices, or the default is none of them.
    """
    if isinstance(choices, str):
        raise SpaceError(
            f"knob {name}: choices are one text, {choices!r}, not several",
            hint="Give a list of choices.",
        )
    return CategoricalKnob(name, help, group, exact, unit, condition, tuple(choices), default)


_KINDS: dict[str, type[FloatKnob] | type[IntegerKnob] | type[CategoricalKnob]] = {
    "float": FloatKnob,
    "integer": IntegerKnob,
    "categorical": CategoricalKnob,
}


def knob_to_json(knob: Knob) -> dict[str, Any]:
    """Return a plain dictionary for :func:`knob_from_json`."""
    fields: dict[str, Any] = dict(vars(knob))
    if knob.condition is not None:
        fields["condition"] = {"knob": knob.condition.knob, "values": list(knob.condition.values)}
    if isinstance(knob, CategoricalKnob):
        fields["choices"] = list(knob.choices)
    kind = next(name for name, cls in _KINDS.items() if type(knob) is cls)
    return {"kind": kind, **fields}


def knob_from_json(fields: Mapping[str, Any]) -> Knob:
    """Return the knob that :func:`knob_to_json` has written.

    Raises:
        SpaceError: The dictionary does not describe a knob.
    """
    try:
        rest = dict(fields)
        return read(_KINDS[rest.pop("kind")], rest)
    except (KeyError, TypeError, ValueError) as error:
        raise SpaceError(
            f"not a knob: {error!r}", hint="Use a dictionary that knob_to_json() has returned."
        ) from None
