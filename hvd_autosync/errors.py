"""The one family of errors. Each says what was wrong, with which value, and what to do.

``AutosyncError`` is the root: catching it catches everything this project raises on purpose. The
faces print ``message`` and ``hint`` without a traceback; anything else that escapes is a bug.
"""

from __future__ import annotations

from hvd_autosync.util.printable import printable_lines


class AutosyncError(Exception):
    """Root of the family.

    Args:
        message: What was wrong, with the value that was wrong.
        hint: What to do about it, as an imperative sentence.
    """

    #: Exit status of a command that ends with this error (sysexits(3) where one fits).
    exit_status = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.message}\n  {self.hint}" if self.hint else self.message
        return printable_lines(text)  # it may quote what a script or a stranger has written


class ConfigurationError(AutosyncError):
    """An option, a file or an argument has a value that cannot be used; nothing was started."""

    exit_status = 2


class SpaceError(ConfigurationError):
    """A knob, a domain or a strategy does not fit the search space."""


class HorovodBuildError(AutosyncError):
    """This Horovod build or installation cannot do what the job needs."""


class DefaultTrialError(AutosyncError):
    """The job fails, or cannot be measured, without any change of ours.

    Attributes:
        exit_status: The exit status of the user's own job.
    """

    def __init__(self, message: str, *, hint: str = "", exit_status: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.exit_status = exit_status


class ShortJobError(DefaultTrialError):
    """The job is sound, but too short for its tuning, or the minutes of that are."""


class TrialFilesError(AutosyncError):
    """A trial changed a file that cannot be put back: nothing may be trained from it."""


class StudyError(AutosyncError):
    """A study was asked or told something that its state does not allow."""


class StoreError(AutosyncError):
    """The trace store cannot be opened, read or written."""


class TraceFormatError(StoreError):
    """A trace file is damaged, of a newer version, or not a trace; it was left untouched."""
