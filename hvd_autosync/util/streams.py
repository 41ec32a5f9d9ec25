"""Replacements for standard streams that are closed at a program's start, as by ``2>&-``."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import TextIO

#: Errors of writing.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_standard_streams() -> None:
    """Open ``/dev/null`` in place of a closed standard input, output or error.

    Otherwise Python sets the stream to ``None``, which cannot be written to, or which ``print``
    takes for standard output. Also, the next opened file or socket would get the stream's number,
    and with it the output of children and libraries. Call this at the start, before other files are
    opened.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            # open() returns the lowest free number, which is this one: lower ones are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
        else:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def drop_unwritable(stream: TextIO) -> None:
    """Discard what is left of an output that cannot be written.

    Otherwise Python's last flush of it fails, and makes the exit status 120.
    """
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), stream.fileno())


def unwritable_output(error: OSError) -> str:
    """Return the message for an error of writing standard output; empty for another error.

    What is left of the output is discarded, so that Python's last flush of it succeeds. An error of
    opening a file has its name.
    """
    if error.filename is not None or error.errno not in _UNWRITABLE:
        return ""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())
    return f"cannot write the output: {error.strerror}"
