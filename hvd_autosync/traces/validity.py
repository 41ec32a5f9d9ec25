"""Validation of records from files.

A file may be damaged or malicious, and its winner ends up on a command line. So a record must have
exactly the fields that we write (:mod:`hvd_autosync.search_space.records` checks their types and
numbers), its times and words must be such, and a knob with the name of a catalogue knob must be
that knob.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

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
_CATALOGUE = {knob.name for knob in CATALOGUE}
_LONGEST_WORD = 255
_STUDY_ID = re.compile(r"[0-9a-f]{12}")


class UnknownValueError(ValueError):
    """A strategy or a space has a knob or a value that no knob of this process has.

    Attributes:
        hint: What to do if it is not damaged.
    """

    hint = "If an extension adds it, set HVD_AUTOSYNC_EXTENSIONS to its file."


def strict_study(fields: Mapping[str, Any]) -> StudyRecord:
    """Return the study that :meth:`StudyRecord.to_json` wrote.

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
    """Return the trial that :meth:`TrialRecord.to_json` wrote.

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
    except AutosyncError as error:
        raise ValueError(error.message) from None
    # What from_json adds (defaults of missing fields) is written differently.
    for name, value in record.to_json().items():
        if name not in fields or _canonical(value) != _canonical(fields[name]):
            raise ValueError(f"{name} has missing fields or values of a wrong type")
    return record


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


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
        UnknownValueError: A value or a knob is invalid.
    """
    try:
        for knob, value in strategy.items():
            own = space is not None and knob not in _CATALOGUE
            (space[knob] if space is not None and own else catalogue_knob(knob)).validate(value)
    except AutosyncError as error:
        raise UnknownValueError(f"{name}: {error.message}") from None


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
        raise UnknownValueError(f"space: {error.message}") from None


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
