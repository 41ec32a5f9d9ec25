"""The contract of trial runners, and the progress that they report while a trial runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hvd_autosync.launch.limits import Limits
from hvd_autosync.search_space import TrialResult, TrialSpec
from hvd_autosync.util.printable import printable


@dataclass(frozen=True)
class TrialProgress:
    """Where a running trial stands.

    Attributes:
        phase: ``"starting"``, ``"warming up"``, ``"measuring"`` or ``"ending"``.
        steps: Steps that every reporting rank has finished.
        of: Steps that the trial runs in all.
        elapsed_s: Seconds since launch.
    """

    phase: str
    steps: int
    of: int
    elapsed_s: float


def to_stderr(line: str) -> None:
    """Tell the user something, where nobody else does."""
    print(f"hvd-autosync: {printable(line)}", file=sys.stderr)


class TrialRunner(Protocol):
    """Runs trials, one at a time.

    ``run`` returns a result for every way in which a trial can end; it raises only what is not
    the trial's doing (``KeyboardInterrupt``, after everything was cleaned up on every host).
    """

    def run(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """Run one trial to its end."""
        ...

    def close(self) -> None:
        """Give back what is kept from one trial to the next."""
        ...
