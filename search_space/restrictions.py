"""A user's restrictions of a search space: bounds, choices and fixed values.

They are in a TOML file (``--autosync-space FILE``)::

    [knobs.cycle_time_ms]
    low = 0.5
    high = 10

    [knobs.fusion_threshold_bytes]
    fixed = 67108864

    [knobs.controller]
    choices = ["gloo"]
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.catalogue import REGISTRY, catalogue_knob
from hvd_autosync.search_space.knob_spec import nowhere
from hvd_autosync.search_space.knobs import LOSSY_GROUPS, CategoricalKnob, Condition, Knob, Value
from hvd_autosync.search_space.space import SearchSpace

_NUMERIC_KEYS = {"fixed", "low", "high"}
_CATEGORICAL_KEYS = {"fixed", "choices"}


def check_restrictions(document: Mapping[str, Any]) -> None:
    """Check a parsed file against the catalogue, before anything is launched.

    Raises:
        SpaceError: A table, knob or key is unknown, a value has the wrong type, bounds are
            impossible, or a fixed knob has bounds or choices.
    """
    unknown = sorted(set(document) - {"knobs"})
    if unknown:
        raise SpaceError(
            f"unknown table [{unknown[0]}] in the space file",
            hint="Use tables [knobs.NAME] with the keys fixed, low, high or choices.",
        )
    tables = document.get("knobs", {})
    if not isinstance(tables, Mapping):
        raise SpaceError("'knobs' is not a table", hint="Write [knobs.NAME] tables.")
    for name, table in tables.items():
        _restricted(catalogue_knob(name), table)


def check_allowed(document: Mapping[str, Any], allow: Collection[str]) -> None:
    """Check that a file excludes no default of a knob that the space will lack.

    The space lacks lossy knobs whose group is not allowed, and knobs that no trial changes. What a
    file says of them is ignored. So a file may move a lossy default that the default switches off.

    Args:
        document: The parsed file, which :func:`check_restrictions` accepts.
        allow: The allowed groups of lossy knobs.

    Raises:
        SpaceError: It does; the message names the knobs.
    """
    knobs = [catalogue_knob(name) for name in document.get("knobs", {})]
    moved = [
        knob
        for knob in knobs
        if _restricted(knob, document["knobs"][knob.name]).default != knob.default
    ]
    if untuned := [knob.name for knob in moved if REGISTRY[knob.name].applies is nowhere]:
        raise SpaceError(
            f"the space file excludes the default of {', '.join(untuned)}, which no trial changes",
            hint="Set such knobs in a strategy file, with --autosync-strategy FILE.",
        )
    lacking = set(LOSSY_GROUPS) - set(allow)
    ignored = [k for k in moved if k.group in lacking and _matters(k, document["knobs"])]
    if ignored:
        groups = sorted({*allow, *(knob.group for knob in ignored)})
        raise SpaceError(
            f"the space file excludes the default of {', '.join(knob.name for knob in ignored)}, "
            "which can change the trained model",
            hint=f"Remove the knobs, or allow that with --autosync-allow {','.join(groups)} "
            "(launched trials only).",
        )


def _matters(knob: Knob, tables: Mapping[str, Any]) -> bool:
    """Return whether a knob's condition holds at the default under the file's tables."""
    if knob.condition is None:
        return True
    parent = catalogue_knob(knob.condition.knob)
    value = _restricted(parent, tables.get(parent.name, {})).default
    return knob.condition.holds({parent.name: value}) and _matters(parent, tables)


def restrict_space(space: SearchSpace, document: Mapping[str, Any]) -> SearchSpace:
    """Return ``space`` under the restrictions of a parsed file.

    Knobs in the file that the space lacks, because they cannot matter for the task, are ignored. A
    fixed knob becomes a dimension of zero width, so that conditions on it are still evaluated. So
    does one of which the file leaves nothing (:func:`left_empty`), at its default.

    Raises:
        SpaceError: As for :func:`check_restrictions`.
    """
    check_restrictions(document)
    empty = left_empty(space, document)
    tables = document.get("knobs", {})
    knobs: list[Knob] = []
    for knob in space.knobs:
        table = tables.get(knob.name)
        if knob.name in empty:
            knobs.append(fixed_knob(knob, knob.default))
        else:
            knobs.append(knob if table is None else _restricted(knob, _possible(knob, table)))
    restricted = SearchSpace(tuple(knobs), space.fixed, holds_job=space.holds_job)
    # Not each knob's default: the default may switch the knob off.
    moved = restricted.default != space.default
    return replace(restricted, holds_job=False) if moved else restricted


def left_empty(space: SearchSpace, document: Mapping[str, Any]) -> list[str]:
    """Return the names of knobs of which a checked file leaves nothing that this job can have.

    A file for several jobs may have values that are too large for a small one.
    """
    empty = []
    for knob in space.knobs:
        table = document.get("knobs", {}).get(knob.name)
        if table is not None:
            try:
                _restricted(knob, _possible(knob, table))
            except SpaceError:
                empty.append(knob.name)
    return empty


def _possible(knob: Knob, table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a checked table without choices that only other jobs have."""
    if "choices" not in table or not isinstance(knob, CategoricalKnob):
        return table
    return {**table, "choices": [each for each in table["choices"] if each in knob.choices]}


def without_choices(space: SearchSpace, unwanted: Mapping[str, Collection[Value]]) -> SearchSpace:
    """Return ``space`` without some choices of its categorical knobs.

    Args:
        space: The space.
        unwanted: Name of a knob -> choices. A knob's default stays.
    """
    knobs: list[Knob] = []
    for knob in space.knobs:
        lost = set(unwanted.get(knob.name, ())) - {knob.default}
        if lost and isinstance(knob, CategoricalKnob):
            knobs.append(knob.restrict([each for each in knob.choices if each not in lost]))
        else:
            knobs.append(knob)
    return SearchSpace(tuple(knobs), space.fixed, holds_job=space.holds_job)


def space_under(
    space: SearchSpace, strategy: Mapping[str, Value], held: Collection[str]
) -> SearchSpace:
    """Return ``space`` for a training that begins under a strategy, which becomes the default.

    Args:
        space: The space.
        strategy: A strategy of it.
        held: Names of knobs that keep its values. Other knobs lose what would switch them off, if
            they are not at their default.
    """
    values = space.complete(strategy)
    knobs: dict[str, Knob] = {}
    needed: dict[str, list[Condition]] = {}
    for knob in reversed(space.knobs):  # a knob comes after the one on which it depends
        value = values.get(knob.name, knob.default)
        own: Knob = replace(knob, default=value)  # type: ignore[arg-type]  # one of its values
        for condition in needed.get(knob.name, ()):
            own = _where(own, condition)
        if knob.name in held:
            own = fixed_knob(knob, value)
        moved = knob.name in held and value != catalogue_knob(knob.name).default
        if (moved or knob.name in needed) and knob.name in values and knob.condition is not None:
            needed.setdefault(knob.condition.knob, []).append(knob.condition)
        knobs[knob.name] = own
    return SearchSpace(tuple(knobs[knob.name] for knob in space.knobs), space.fixed)


def _where(knob: Knob, condition: Condition) -> Knob:
    """Return ``knob`` with no value but those of a condition on it."""
    if isinstance(knob, CategoricalKnob):
        return knob.restrict([each for each in knob.choices if each in condition.values])
    numbers = [float(value) for value in condition.values]
    return knob.restrict(min(numbers), max(numbers))


def _restricted(knob: Knob, table: object) -> Knob:
    """Return ``knob`` under the restrictions of one table of the file."""
    if not isinstance(table, Mapping):
        raise SpaceError(
            f"knob {knob.name}: {table!r} is not a table",
            hint=f"Write [knobs.{knob.name}] with the keys fixed, low, high or choices.",
        )
    allowed = _CATEGORICAL_KEYS if isinstance(knob, CategoricalKnob) else _NUMERIC_KEYS
    for key in table:
        if key not in allowed:
            raise SpaceError(
                f"knob {knob.name}: unknown key {key!r} in the space file",
                hint=f"Use {', '.join(sorted(allowed))}.",
            )
    if "fixed" in table:
        if len(table) > 1:
            raise SpaceError(
                f"knob {knob.name}: fixed excludes {', '.join(sorted(table.keys() - {'fixed'}))}",
                hint="Write either fixed, or low, high or choices.",
            )
        return fixed_knob(knob, table["fixed"])
    if isinstance(knob, CategoricalKnob):
        choices = table.get("choices", list(knob.choices))
        if not isinstance(choices, list):
            raise SpaceError(
                f"knob {knob.name}: choices = {choices!r} is not a list",
                hint="Write choices = [..., ...].",
            )
        return knob.restrict(choices)
    low, high = table.get("low", knob.low), table.get("high", knob.high)
    for bound in (low, high):
        number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
        if not number or not abs(bound) <= sys.float_info.max:
            raise SpaceError(
                f"knob {knob.name}: bound {bound!r} is not a number", hint="Write low = NUMBER."
            )
    return knob.restrict(low, high)


def fixed_knob(knob: Knob, value: Value) -> Knob:
    """Return ``knob`` restricted to one value, as a dimension of zero width."""
    if isinstance(knob, CategoricalKnob):
        return knob.restrict([value])
    knob.validate(value)
    return knob.restrict(float(value), float(value))


def condition_text(condition: Condition) -> str:
    """Return ``condition`` as text, for listings."""
    if len(condition.values) > 3:
        return f"{condition.knob} is {condition.values[0]} to {condition.values[-1]}"
    return f"{condition.knob} is {' or '.join(map(str, condition.values))}"
