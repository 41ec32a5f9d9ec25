"""The rich console, which makes every text printable before it draws it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from hvd_autosync.util.printable import printable, printable_lines, raw


class PrintableConsole(Console):
    """A console that escapes control characters in texts and interprets no markup.

    Strings and cells of tables become one line; a ``Text`` keeps its lines.

    Args:
        stream: Output stream; standard output by default.
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
    """``text`` itself if it is printable; otherwise an escaped copy without partial styles."""
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
