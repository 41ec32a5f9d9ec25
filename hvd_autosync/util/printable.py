"""Text of foreign origin made harmless for a terminal, wherever people see it.

Traces, names of hosts and parameters, and what a script raises may hold characters that move the
cursor, colour or hide text, or reverse its order. All that people read passes through
:func:`printable` or :func:`printable_lines`: commands run inside of :func:`printable_output`,
which also catches what was forgotten. Traces themselves stay as they are.
"""

from __future__ import annotations

import contextlib
import html
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_KEPT_IN_LINES = "\n\t"
#: With these a cell of a spreadsheet begins a formula.
_FORMULA = re.compile(r"[=+\-@]")


def printable(text: str) -> str:
    r"""Return ``text`` on one line, with an escape such as ``\u001b`` for each invisible character.

    Invisible are controls, formats such as bidirectional overrides, separators, halves of pairs.
    The escapes are those of JSON and TOML, so that both stay what they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def printable_lines(text: str) -> str:
    """``text`` with its ends of lines and tabs, but otherwise as :func:`printable` makes it."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in _KEPT_IN_LINES else _escape(c)
        for c in text.replace("\r\n", "\n")
    )


def _escape(character: str) -> str:
    code = ord(character)
    return _SHORT.get(character) or (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def printable_html(text: str) -> str:
    """``text`` on one line and without markup, for HTML and for Plotly, which reads some of it."""
    return html.escape(printable(text))


def printable_cell(text: str) -> str:
    """``text`` as a cell of a CSV file, in which no spreadsheet sees a formula."""
    return printable(f"'{text}" if _FORMULA.match(text) else text)


def shell_line(words: Iterable[str]) -> str:
    """``words`` as one line for a shell; what cannot be printed is written as ``$'...'``."""
    return " ".join(shlex.quote(word) if word.isprintable() else _ansi_c(word) for word in words)


def _ansi_c(word: str) -> str:
    """``word`` in the quotes of bash, ksh and zsh that know escapes."""
    parts = []
    for c in word:
        if c in "\\'":
            parts.append(f"\\{c}")
        elif c.isprintable():
            parts.append(c)
        else:
            parts += [f"\\x{byte:02x}" for byte in c.encode(errors="surrogatepass")]
    return f"$'{''.join(parts)}'"


class _PrintableStream:
    """Passes text on to a stream, made printable; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write ``text``; the number of its characters."""
        self.stream.write(printable_lines(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def printable_output() -> Iterator[None]:
    """Standard output and error of this process, not of those that it starts, made printable.

    A display that moves the cursor itself writes to :func:`raw`, and makes its texts printable.
    """
    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        if stream is not None and not isinstance(stream, _PrintableStream):
            setattr(sys, name, _PrintableStream(stream))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def raw(stream: TextIO) -> TextIO:
    """The stream below one that :func:`printable_output` has made printable."""
    return stream.stream if isinstance(stream, _PrintableStream) else stream
