"""Environment variables that are looked for where the module that uses them is not imported."""

from __future__ import annotations

#: Lowest level that :mod:`hvd_autosync.util.log` writes; without this variable there is no log.
LOG_VARIABLE = "HVD_AUTOSYNC_LOG"
