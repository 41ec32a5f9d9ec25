"""The finding of a check of an installation."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass


class Severity(str, enum.Enum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        subject: What was checked.
        severity: Its severity.
        text: What was found.
        remedy: What to do; empty if there is nothing to do.
    """

    subject: str
    severity: Severity
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """Return a plain dictionary."""
        return {**asdict(self), "severity": self.severity.value}
