"""The log of driver and workers, for debugging: ``HVD_AUTOSYNC_LOG=debug``.

Messages for users are printed without it. Each line has the rank and the module that wrote it::

    hvd-autosync debug [rank 1] runtime.sync.phases: step 640: ranks stop waiting for each other
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from hvd_autosync.util.variables import LOG_VARIABLE

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_PACKAGE = "hvd_autosync"


class _Lines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        module = record.name.removeprefix(f"{_PACKAGE}.")
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        head = f"hvd-autosync {record.levelname.lower()} [{self._process}] {module}: "
        return "\n".join(head + line for line in message.splitlines())


def log_level(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the level that the variable names; ``None`` if it is not set.

    Raises:
        ValueError: The variable is not a level; the message lists the levels.
    """
    name = environment.get(LOG_VARIABLE, "")
    if name and name.lower() not in _LEVELS:
        raise ValueError(f"{LOG_VARIABLE} is {name!r}; the levels are {', '.join(_LEVELS)}")
    return _LEVELS.get(name.lower())


def start_log(process: str, environment: Mapping[str, str] = os.environ) -> None:
    """Write the package's log to the error output, if the variable is set.

    Args:
        process: Name of this process, such as ``rank 1`` or ``driver``.
        environment: The environment with the variable.

    Raises:
        ValueError: The variable is not a level; the message lists the levels.
    """
    level = log_level(environment)
    if level is None:
        return
    logger = logging.getLogger(_PACKAGE)
    if logger.handlers:  # set up before the fork
        for handler in logger.handlers:
            handler.setFormatter(_Lines(process))
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(process))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False  # a script's own root logger would write each line again
