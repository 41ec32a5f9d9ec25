"""What is said of a whole job, by rank 0, once."""

from __future__ import annotations

import math
import sys

from horovod.torch.mpi_ops import rank

#: Steps for which something must last.
_TELL_AFTER = 64


def warn_on_rank_0(text: str) -> None:
    """Say what is so on all ranks."""
    if rank() == 0:
        print(f"hvd-autosync: {text}", file=sys.stderr)


class WarnOnce:
    """Something that is worth a word if it lasts.

    Args:
        text: The word.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        #: The step at which it was seen first; infinite once it was said.
        self._since: float | None = None

    def gone(self) -> None:
        """It is not so any more."""
        if self._since is not None and math.isfinite(self._since):
            self._since = None

    def seen(self, step: int) -> None:
        """It is so after this step; on all ranks, or on rank 0."""
        if self._since is None:
            self._since = step
        if step - self._since >= _TELL_AFTER:
            self._since = math.inf
            warn_on_rank_0(self._text)
