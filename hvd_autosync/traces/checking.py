"""Validation of records from files.

A file may be damaged or malicious, and its winner ends up on a command line. So a record must have
exactly the fields and types that we write, its numbers must be possible, and a knob with the name
of a catalogue knob must be that knob.
"""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from datetime import datetime
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hvd_autosync.errors import AutosyncError
from hvd_autosync.search_space import (
    CATALOGUE,
    CategoricalKnob,
    Knob,
    SearchSpace,
    Strategy,
    catalogue_knob,
)
from hvd_autosync.traces.aliases import with_current_keys
from hvd_autosync.traces.records import StudyRecord, TrialRecord, timestamp

_Record = TypeVar("_Record", StudyRecord, TrialRecord)
#: Numbers whose names end in these cannot be negative.
_NOT_NEGATIVE = ("_s", "_bytes", "_steps", "slots", "shape")
_POSITIVE = ("_per_s",)
_CATALOGUE = {knob.name for knob in CATALOGUE}
_LONGEST_WORD = 255
_STUDY_ID = re.compile(r"[0-9a-f]{12}")


def strict_study(fields: Mapping[str, Any]) -> StudyRecord:
    """The study that :meth:`StudyRecord.to_json` wrote.

    Raises:
        ValueError: ``fields`` is not such a study; the message says what is wrong.
    """
    study = _strict(StudyRecord, fields)
    if not _STUDY_ID.fullmatch(study.study_id):
        raise ValueError(f"study_id {study.study_id!r} is not 12 hexadecimal digits")
    _check_word("job_key", study.job_key)
    _check_time("created_at", study.created_at)
    if study.space is not None:
        _check_space(study.space)
    check_strategy("winner", study.winner or Strategy(), study.space)
    return study


def strict_trial(fields: Mapping[str, Any], study: StudyRecord, number: int) -> TrialRecord:
    """The trial that :meth:`TrialRecord.to_json` wrote.

    Args:
        fields: The fields of the record.
        study: The study that the trial must belong to.
        number: The number that the trial must have.

    Raises:
        ValueError: ``fields`` is not such a trial; the message says what is wrong.
    """
    trial = _strict(TrialRecord, fields)
    if (trial.study_id, trial.number) != (study.study_id, number):
        raise ValueError(
            f"found trial {trial.number} of study {trial.study_id!r} instead of trial {number} "
            f"of study {study.study_id!r}"
        )
    _check_word("kind", trial.kind)
    _check_time("asked_at", trial.asked_at)
    if (trial.told_at is None) != (trial.result is None):
        raise ValueError("only one of told_at and result is present")
    if trial.told_at is not None:
        _check_time("told_at", trial.told_at)
    check_strategy("strategy", trial.strategy, study.space)
    return trial


def _strict(kind: type[_Record], fields: Mapping[str, Any]) -> _Record:
    fields = with_current_keys(fields)
    try:
        record = kind.from_json(fields)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"not a {kind.__name__}: {error!r:.200}") from None
    except AutosyncError as error:
        raise ValueError(error.message) from None
    problem = type_problem(record)
    if problem is not None:
        raise ValueError(problem)
    # Anything that from_json tolerated (text for a list, unknown fields) is written differently.
    for name, value in record.to_json().items():
        if _canonical(value) != _canonical(fields[name]):
            raise ValueError(f"{name} has unknown fields or values of a wrong type")
    return record


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def type_problem(value: Any) -> str | None:
    """Why a dataclass made from JSON has a field of a wrong type; ``None`` if all are right."""
    return _problem(value, type(value), "")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _problem(value: Any, kind: Any, where: str) -> str | None:
    """Why ``value`` is not of the annotated type ``kind``; ``None`` if it is."""
    arguments = get_args(kind)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        problems = [_problem(value, argument, where) for argument in arguments]
        return None if None in problems else problems[0]
    if origin is tuple and isinstance(value, tuple):
        kinds = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        if len(kinds) == len(value):
            return _first_problem(value, kinds, [where] * len(value))
    elif origin is dict and isinstance(value, dict):
        return _first_problem(value.values(), [arguments[1]] * len(value), value.keys())
    elif is_dataclass(kind) and type(value) is kind:
        hints = _hints(value.__class__)
        inside = {name: getattr(value, name) for name in hints}
        problem = _first_problem(inside.values(), hints.values(), inside.keys())
        return problem or _impossible_number(inside)
    elif (
        kind is Any
        or (origin is Literal and value in arguments)
        or (kind is float and type(value) in (int, float))
        or (
            isinstance(kind, type)
            and isinstance(value, kind)
            and not is_dataclass(kind)
            and (kind is not int or type(value) is int)  # bool is a subclass of int
        )
    ):
        return None
    return f"{where or 'a value'}: {value!r:.60} is not of type {getattr(kind, '__name__', kind)}"


def _first_problem(values: Any, kinds: Any, names: Any) -> str | None:
    for value, kind, name in zip(values, kinds, names, strict=True):
        problem = _problem(value, kind, name)
        if problem is not None:
            return problem
    return None


def _impossible_number(fields: Mapping[str, Any]) -> str | None:
    for name, value in fields.items():
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if isinstance(number, (int, float)) and (
                (number < 0 and name.endswith(_NOT_NEGATIVE))
                or (number <= 0 and name.endswith(_POSITIVE))
            ):
                return f"{name}: {number!r} is impossible"
    return None


def _check_word(name: str, word: str) -> None:
    if not word.isprintable() or len(word) > _LONGEST_WORD:
        raise ValueError(f"{name} {word!r:.60} is too long or not printable")


def _check_time(name: str, text: str) -> None:
    try:
        correct = timestamp(datetime.fromisoformat(text)) == text
    except (ValueError, OverflowError):
        correct = False
    if not correct:
        raise ValueError(f"{name} {text!r:.60} is not an ISO 8601 time in UTC with microseconds")


def check_strategy(name: str, strategy: Strategy, space: SearchSpace | None) -> None:
    """Check that each value is in its knob's domain: of the catalogue, or else of the space.

    Raises:
        ValueError: A value or a knob is invalid.
    """
    try:
        for knob, value in strategy.items():
            own = space is not None and knob not in _CATALOGUE
            (space[knob] if space is not None and own else catalogue_knob(knob)).validate(value)
    except AutosyncError as error:
        raise ValueError(f"{name}: {error.message}") from None


def _check_space(space: SearchSpace) -> None:
    """Check that catalogue knobs are at most restricted, and that both ends of all knobs work."""
    try:
        for knob in space.knobs:
            if knob.name in _CATALOGUE:
                _check_knob(knob, catalogue_knob(knob.name))
        for end in (0.0, 1.0):
            point = space.encode(space.decode([end] * space.dimension))
            if not ((point >= 0) & (point <= 1)).all():
                raise ValueError("space: the domain of a knob is impossible")
    except ArithmeticError as error:
        raise ValueError(f"space: the domain of a knob is impossible: {error}") from None
    except AutosyncError as error:
        raise ValueError(f"space: {error.message}") from None


def _check_knob(knob: Knob, known: Knob) -> None:
    ends = knob.choices if isinstance(knob, CategoricalKnob) else (knob.low, knob.high)
    for value in ends:
        known.validate(value)
    for name in ("unit", "exact"):
        if getattr(knob, name) != getattr(known, name):
            raise ValueError(
                f"space: knob {knob.name} has {name} {getattr(knob, name)!r} "
                f"instead of {getattr(known, name)!r}"
            )
