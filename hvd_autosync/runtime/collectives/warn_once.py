"""Messages about a whole job, which rank 0 prints once."""

from __future__ import annotations

import math

from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.util.print_line import print_line

#: Steps for which a condition must last before it is reported.
_TELL_AFTER = 64


def warn_on_rank_0(text: str) -> None:
    """Print ``text`` on rank 0; call it for what holds on all ranks."""
    if rank() == 0:
        print_line(text)


class WarnOnce:
    """Prints a message once a condition has lasted for some steps.

    Args:
        text: The message.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        #: The first step of the condition; infinite once the message was printed.
        self._since: float | None = None

    def gone(self) -> None:
        """The condition does not hold any more."""
        if self._since is not None and math.isfinite(self._since):
            self._since = None

    def seen(self, step: int) -> None:
        """The condition holds after this step, on all ranks or on rank 0."""
        if self._since is None:
            self._since = step
        if step - self._since >= _TELL_AFTER:
            self._since = math.inf
            warn_on_rank_0(self._text)
