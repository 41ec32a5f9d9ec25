"""The hierarchy of errors. Each error says what is wrong, with which value, and what to do.

``AutosyncError`` is the base class of all errors that this project raises on purpose. Commands
print ``message`` and ``hint`` without a traceback; any other exception that escapes is a bug.
"""

from __future__ import annotations

from hvd_autosync.util.printable import printable_lines


class AutosyncError(Exception):
    """Base class of the errors of this project.

    Args:
        message: What is wrong, with the wrong value.
        hint: What to do about it, as an imperative sentence.
    """

    #: Exit status of a command that ends with this error.
    exit_status = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.message}\n  {self.hint}" if self.hint else self.message
        return printable_lines(text)  # it may quote untrusted text


class ConfigurationError(AutosyncError):
    """An option, a file or an argument has an invalid value; nothing was launched."""

    exit_status = 2


class SpaceError(ConfigurationError):
    """A knob, a domain or a strategy does not fit the search space."""


class HorovodBuildError(AutosyncError):
    """This Horovod build or installation cannot do what the job needs."""


class DefaultTrialError(AutosyncError):
    """The job fails, or cannot be measured, under the default strategy.

    Attributes:
        exit_status: The exit status of the user's own job.
    """

    def __init__(self, message: str, *, hint: str = "", exit_status: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.exit_status = exit_status


class ShortJobError(DefaultTrialError):
    """The job works, but the job or the minutes of its tuning are too short to tune it."""


class LiveTuningError(AutosyncError):
    """A running training has ended, or cannot be tuned in its own steps."""


class TrialFilesError(AutosyncError):
    """A trial changed a file that cannot be restored, so the training must not start from it."""


class FolderInUseError(TrialFilesError):
    """Another job is being tuned in the working directory, where trials have no private files."""


class StudyError(AutosyncError):
    """An operation on a study that its state does not allow."""


class StoreError(AutosyncError):
    """The trace store cannot be opened, read or written."""


class NotOwnerError(StoreError):
    """A study belongs to another driver, or does not belong to this one any more."""


class TraceFormatError(StoreError):
    """A trace file is damaged, of a newer version, or not a trace; it was not changed."""
