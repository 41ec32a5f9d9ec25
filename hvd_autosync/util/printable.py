"""Escapes invisible characters of untrusted text before it is shown.

Traces, names of hosts and parameters, and a script's exceptions may hold characters that move the
cursor, colour or hide text, or reverse its order. All text for people passes through
:func:`printable` or :func:`printable_lines`. Commands also run inside :func:`printable_output`,
which catches omissions. Traces themselves stay unchanged.
"""

from __future__ import annotations

import contextlib
import html
import io
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_KEPT_IN_LINES = "\n\t"
#: First characters of a formula in a spreadsheet's cell.
_FORMULA = re.compile(r"[=+\-@]")


def printable(text: str) -> str:
    r"""Return ``text`` on one line, with an escape such as ``\u001b`` for invisible characters.

    These are controls, formats such as bidirectional overrides, separators other than the space,
    surrogates and unassigned characters. The escapes are valid in JSON and TOML.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def printable_lines(text: str) -> str:
    """Escape ``text`` as :func:`printable` does, but keep line ends and tabs."""
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
    """Return ``text`` on one line and without markup, for HTML and for Plotly."""
    return html.escape(printable(text))


def printable_cell(text: str) -> str:
    """Return ``text`` as a cell of a CSV file that no spreadsheet reads as a formula."""
    return printable(f"'{text}" if _FORMULA.match(text) else text)


def shell_line(words: Iterable[str]) -> str:
    """Return ``words`` as one line for a shell; unprintable words are quoted as ``$'...'``."""
    return " ".join(shlex.quote(word) if word.isprintable() else _ansi_c(word) for word in words)


def _ansi_c(word: str) -> str:
    """Quote ``word`` as ``$'...'``, which bash, ksh and zsh read."""
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
    """Wraps a stream and escapes the text that is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write ``text``; return the number of its characters."""
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
    """Escape what this process, without its children, writes to standard output and error.

    Characters that the encoding of a stream lacks are escaped, too.
    A display that moves the cursor writes to :func:`raw` and escapes its texts itself.
    """
    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        if stream is not None and not isinstance(stream, _PrintableStream):
            setattr(sys, name, _PrintableStream(stream))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def raw(stream: TextIO) -> TextIO:
    """Return the stream inside one that :func:`printable_output` has wrapped."""
    return stream.stream if isinstance(stream, _PrintableStream) else stream
