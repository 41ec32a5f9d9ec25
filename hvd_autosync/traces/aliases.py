"""Aliases: keys that traces of earlier versions have, and what they are called now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Field of a record -> key in it -> its name now.
_RENAMED = {
    "settings": {"anew": "retune", "fewer": "adaptive_steps", "left": "excluded"},
    "info": {"experts": "priors"},
}


def with_current_keys(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a study or a trial with the keys that this version writes.

    Args:
        fields: As read from a file or the store; unchanged where they are no dictionaries.
    """
    renamed = dict(fields)
    for field, names in _RENAMED.items():
        value = renamed.get(field)
        if isinstance(value, dict) and not names.keys().isdisjoint(value):
            renamed[field] = {names.get(key, key): entry for key, entry in value.items()}
    return renamed
