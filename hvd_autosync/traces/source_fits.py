"""Cached fits of the models of related studies; each function runs in the caller's transaction.

A fit is a list of numbers, the hyperparameters. Its key stands for everything that it follows
from, so a fit is found only where fitting again would give the same numbers. A digest of both is
kept with the numbers, so a damaged fit is not found.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Sequence

from sqlalchemy import Connection, inspect, select
from sqlalchemy.exc import DBAPIError

from hvd_autosync.traces.schema import SOURCE_FITS


def find_fit(connection: Connection, study_id: str, key: str) -> tuple[float, ...] | None:
    """Return the fit of a study under this key; ``None`` if there is none or it is damaged."""
    if not inspect(connection).has_table(SOURCE_FITS.name):
        return None
    wanted = SOURCE_FITS.c.study_id == study_id, SOURCE_FITS.c.key == key
    try:
        found = connection.execute(select(SOURCE_FITS.c.hyperparameters).where(*wanted)).scalar()
        if not isinstance(found, dict):
            return None
        values = tuple(float(value) for value in found["values"])
        if found["digest"] != _digest(key, values):
            return None
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    return values if values and all(map(math.isfinite, values)) else None


def keep_fit(
    connection: Connection, study_id: str, key: str, hyperparameters: tuple[float, ...]
) -> None:
    """Write the fit of a study, in place of an earlier one."""
    # Another process may create the table at this moment, if no lock prevents that.
    with contextlib.suppress(DBAPIError), connection.begin_nested():
        SOURCE_FITS.create(connection, checkfirst=True)
    delete_fit(connection, study_id)
    kept = {"values": list(hyperparameters), "digest": _digest(key, hyperparameters)}
    row = {"study_id": study_id, "key": key, "hyperparameters": kept}
    # Another driver may keep the same fit at this moment; its numbers are the same.
    with contextlib.suppress(DBAPIError), connection.begin_nested():
        connection.execute(SOURCE_FITS.insert().values(**row))


def delete_fit(connection: Connection, study_id: str) -> None:
    """Delete the fit of a study, if there is one."""
    if inspect(connection).has_table(SOURCE_FITS.name):
        connection.execute(SOURCE_FITS.delete().where(SOURCE_FITS.c.study_id == study_id))


def _digest(key: str, values: Sequence[float]) -> str:
    return hashlib.sha256(json.dumps([key, *values]).encode()).hexdigest()
