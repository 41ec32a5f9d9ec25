"""The log of driver and workers, for who looks for a fault: ``HVD_AUTOSYNC_LOG=debug``.

What users must see is printed without it. Each line has the rank and the module that wrote it::

    hvd-autosync debug [rank 1] runtime.sync.protocols: step 640: ranks stop waiting for each other
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

#: Least severe level that is written; nothing is without it.
LOG_VARIABLE = "HVD_AUTOSYNC_LOG"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_PACKAGE = "hvd_autosync"


class _Lines(logging.Formatter):
    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        module = record.name.removeprefix(f"{_PACKAGE}.")
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        head = f"hvd-autosync {record.levelname.lower()} [{self._who}] {module}: "
        return "\n".join(head + line for line in message.splitlines())


def start_log(who: str, environment: Mapping[str, str] = os.environ) -> None:
    """Write the package's log to the error output, if the variable asks for it.

    Args:
        who: This process, such as ``rank 1`` or ``driver``.
        environment: Where the variable is looked up.

    Raises:
        ValueError: The variable names no level; says which there are.
    """
    name = environment.get(LOG_VARIABLE, "")
    if not name:
        return
    if name.lower() not in _LEVELS:
        raise ValueError(f"{LOG_VARIABLE} is {name!r}; the levels are {', '.join(_LEVELS)}")
    logger = logging.getLogger(_PACKAGE)
    if logger.handlers:  # a fork's parent has begun
        for handler in logger.handlers:
            handler.setFormatter(_Lines(who))
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(who))
    logger.addHandler(handler)
    logger.setLevel(_LEVELS[name.lower()])
    logger.propagate = False  # a script's own root logger would write each line again
