"""Lines for the user in the error output.

They never fail: where the error output is on a full disk or a lost terminal, or the script has
closed or replaced it, a line of ours must end neither the training nor what follows it.
"""

from __future__ import annotations

import contextlib
import sys

from hvd_autosync.util.printable import printable, printable_lines


def print_line(text: str) -> None:
    """Print ``text`` on one line, with the name of this package before it."""
    _print(printable(text))


def print_error(error: object) -> None:
    """Print an error with its hint, which has a line of its own."""
    _print(f"error: {printable_lines(str(error))}")


def _print(text: str) -> None:
    with contextlib.suppress(Exception):
        print(f"hvd-autosync: {text}", file=sys.stderr, flush=True)
