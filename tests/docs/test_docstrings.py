"""Docstrings of functions have one mood."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("hvd_autosync", "launch", "search_space")
#: With them a docstring names what is returned, as one of a property does.
NAMING = {"A", "All", "An", "Each", "How", "The", "This", "What", "Where", "Whether", "Why"}
_PROPERTIES = {"property", "cached_property"}


def of_functions(folder: str) -> Iterator[tuple[str, str]]:
    """Place and first word of the docstring of each function that returns something."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or node.returns is None:
                continue
            decorators = {ast.unparse(each).split(".")[-1] for each in node.decorator_list}
            if decorators & _PROPERTIES or ast.unparse(node.returns) in ("None", "NoReturn"):
                continue
            if text := ast.get_docstring(node):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text.split(maxsplit=1)[0]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_function_is_told_what_to_do(folder: str) -> None:
    """And a property is named."""
    words = dict(of_functions(folder))
    assert "Return" in words.values()
    assert [place for place, word in words.items() if word in NAMING] == []
