"""Standard streams that a program was started without, as by ``2>&-``, opened on nothing."""

from __future__ import annotations

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_standard_streams() -> None:
    """Put ``/dev/null`` where standard input, output or error is closed.

    Else Python has ``None`` for it, which cannot be written to, or which ``print`` takes for
    standard output; and the next file or socket that is opened gets the number of the stream, and
    what a child or a library writes there. Called at the start, before anything stays open.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number: those below were closed too and are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
        else:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
