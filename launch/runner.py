"""The interface of trial runners, and the progress that they report during a trial."""

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
    """The progress of a running trial.

    Attributes:
        phase: ``"starting"``, ``"warming up"``, ``"measuring"`` or ``"ending"``.
        steps: Steps that every reporting rank has finished.
        of: Total number of the trial's steps.
        elapsed_s: Seconds since launch.
    """

    phase: str
    steps: int
    of: int
    elapsed_s: float


def to_stderr(line: str) -> None:
    """Print a line for the user to the error output."""
    print(f"hvd-autosync: {printable(line)}", file=sys.stderr)


class TrialRunner(Protocol):
    """Runs trials, one at a time.

    ``run`` returns a result for every way in which a trial can end. It raises only errors that the
    trial did not cause, such as ``KeyboardInterrupt``, after cleaning up on every host.
    """

    def run(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """Run one trial to its end."""
        ...

    def close(self) -> None:
        """Release all that is kept between trials."""
        ...
