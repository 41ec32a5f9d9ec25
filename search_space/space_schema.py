"""The JSON Schema of the space file, for editors that check TOML."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvd_autosync.search_space.knobs import CategoricalKnob, IntegerKnob, Knob

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def space_schema(knobs: Iterable[Knob]) -> dict[str, Any]:
    """Return the schema of the files that :func:`..restrictions.check_restrictions` accepts.

    A schema cannot say that ``low`` is at most ``high``.
    """
    return {
        "$schema": _DIALECT,
        "title": "Space file of hvd-autosync",
        "type": "object",
        "properties": {
            "knobs": {
                "type": "object",
                "properties": {knob.name: _table(knob) for knob in knobs},
                "additionalProperties": False,
            }
        },
        "additionalProperties": False,
    }


def _table(knob: Knob) -> dict[str, Any]:
    if isinstance(knob, CategoricalKnob):
        choices = {"enum": list(knob.choices)}
        keys: dict[str, Any] = {
            "fixed": choices,
            "choices": {"type": "array", "items": choices, "minItems": 1},
        }
    else:
        kind = "integer" if isinstance(knob, IntegerKnob) else "number"
        keys = {
            "fixed": {"type": kind, "minimum": knob.low, "maximum": knob.high},
            # Bounds may lie outside of the domain, as long as something of it is left.
            "low": {"type": "number", "maximum": knob.high},
            "high": {"type": "number", "minimum": knob.low},
        }
    unit = f" ({knob.unit})" if knob.unit else ""
    return {
        "type": "object",
        "description": f"{knob.help}{unit}",
        "default": {"fixed": knob.default},
        "properties": keys,
        "dependentSchemas": {"fixed": {"maxProperties": 1}},
        "additionalProperties": False,
    }
