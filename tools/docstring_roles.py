"""Turns what docstrings name in Sphinx's way, ``:func:`tune```, into links of the API pages.

What is on no page stays plain code.
"""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":\w+:`(~?)([^`]+)`")


class Roles(griffe.Extension):
    """Called for everything that has a docstring."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        """Replace the roles in one docstring."""
        if obj.docstring is None:
            return

        def link(role: re.Match[str]) -> str:
            short, name = role.groups()
            shown = name.rpartition(".")[2] if short else name
            target = _resolved(obj, name)
            return f'<autoref optional identifier="{target}"><code>{shown}</code></autoref>'

        obj.docstring.value = _ROLE.sub(link, obj.docstring.value)


def _resolved(obj: griffe.Object, name: str) -> str:
    """The whole path of a name as the docstring of ``obj`` means it."""
    if name.startswith(".."):
        return f"{obj.package.path}.{name[2:]}"
    first, dot, rest = name.lstrip(".").partition(".")
    try:
        return f"{obj.resolve(first)}{dot}{rest}"
    except griffe.NameResolutionError:
        return name
