"""What a check of an installation has found."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass


class Severity(str, enum.Enum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        subject: What was looked at.
        severity: How it came out.
        text: What was found.
        remedy: What to do; empty when there is nothing to do.
    """

    subject: str
    severity: Severity
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """A plain dictionary."""
        return {**asdict(self), "severity": self.severity.value}
