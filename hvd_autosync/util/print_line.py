"""Lines for the user in the error output of a rank."""

from __future__ import annotations

import sys


def print_line(text: str) -> None:
    """Print ``text`` for the user, with the name of this package before it."""
    print(f"hvd-autosync: {text}", file=sys.stderr)
