"""Explanations as Markdown, for issues and notes."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hvd_autosync.reporting.explanation import Section, Verbatim
from hvd_autosync.util.printable import printable


def markdown(sections: Iterable[Section]) -> str:
    """Return the sections of an explanation as one text."""
    blocks: list[str] = []
    for section in sections:
        if section.title:
            blocks.append(f"## {section.title}")
        blocks += [_block(each) for each in section.content]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _block(content: RenderableType) -> str:
    if isinstance(content, Verbatim):
        return f"```\n{content.plain.rstrip()}\n```"
    if isinstance(content, Table):
        return _table(content)
    return (
        f"> {_escaped(plain(content))}"
        if isinstance(content, Padding)
        else _escaped(plain(content))
    )


def plain(content: RenderableType) -> str:
    """Return the text of a paragraph, on one line."""
    if isinstance(content, Padding):
        return plain(content.renderable)
    return printable(content.plain if isinstance(content, Text) else str(content))


def table_rows(table: Table) -> tuple[list[str], list[list[str]]]:
    """Names of columns and the rows of a table, as texts."""
    names = [plain(column.header) for column in table.columns]
    cells = [[plain(cell) for cell in column.cells] for column in table.columns]
    return names, [list(row) for row in zip(*cells, strict=True)]


def _table(table: Table) -> str:
    names, rows = table_rows(table)
    lines = [names, ["---"] * len(names), *rows]
    text = "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines)
    return f"{text}\n\n{_escaped(plain(table.caption))}" if table.caption else text


def _escaped(text: str) -> str:
    for character in "\\*_|<>`[]":  # without brackets there are no links and no images
        text = text.replace(character, "\\" + character)
    return text
