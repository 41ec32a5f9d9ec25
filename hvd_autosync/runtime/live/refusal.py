"""A training that cannot be tuned in its own steps hands over to launched trials."""

from __future__ import annotations

from pathlib import Path

from hvd_autosync.runtime.collectives.agreement import agree_any
from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.live.notes import write_note


def hand_over(path: str, reason: str) -> bool:
    """Let the flag know why the training ends; a collective.

    Args:
        path: The file for the reason, in a folder of the flag's; empty if nobody reads it.
        reason: The reason.

    Returns:
        Whether the flag goes on once all ranks have ended; else they train on.
    """
    written = bool(path)
    if written and rank() == 0:
        try:
            write_note(Path(path), reason)
        except OSError:  # such as a full disk
            written = False
    return not any(agree_any([not written], "live.refusal"))
