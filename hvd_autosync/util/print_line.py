"""Lines for the user in the error output of a rank."""

from __future__ import annotations

import contextlib
import sys


def print_line(text: str) -> None:
    """Print ``text`` for the user, with the name of this package before it.

    It never fails: where the error output is on a full disk, or the script has closed or replaced
    it, a line of ours must not end the training.
    """
    with contextlib.suppress(Exception):
        print(f"hvd-autosync: {text}", file=sys.stderr, flush=True)
