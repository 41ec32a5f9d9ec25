"""Lets the API pages show what docstrings name in Sphinx's way, ``:func:`tune```, as plain code."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":\w+:`~?([^`]+)`")


class Roles(griffe.Extension):
    """Called for everything that has a docstring."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        """Replace the roles in one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"``\1``", obj.docstring.value)
