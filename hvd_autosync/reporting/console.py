"""Where rich prints: every text that it draws is made printable, wherever it stands."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from hvd_autosync.util.printable import printable, printable_lines, raw


class PrintableConsole(Console):
    """A console that draws no control characters but its own, and reads no markup.

    A string is of one line, as are the cells of tables; a ``Text`` keeps its lines.

    Args:
        stream: Where it prints; standard output unless told otherwise.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(file=raw(stream or sys.stdout), markup=False, highlight=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """See :meth:`rich.console.Console.render_str`."""
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """See :meth:`rich.console.Console.render`."""
        if isinstance(renderable, Text):
            renderable = _printable_text(renderable)
        return super().render(renderable, options)


def _printable_text(text: Text) -> Text:
    """``text`` itself where it is printable; else without the styles of its parts."""
    plain = printable_lines(text.plain)
    if plain == text.plain:
        return text
    return Text(
        plain,
        style=text.style,
        justify=text.justify,
        overflow=text.overflow,
        no_wrap=text.no_wrap,
        end=text.end,
    )
