"""Outages of a database server: waiting for it, and repeating lost transactions.

If the connection ends before a transaction's commit, nothing was written, and the transaction can
be repeated. If it ends during the commit, the transaction may have been written; PostgreSQL reports
this for the transaction's number.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from hvd_autosync.errors import StoreError
from hvd_autosync.traces.location import Location
from hvd_autosync.util.print_line import print_line

#: Longest outage that is waited for.
WAIT_S = 600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0

_P = ParamSpec("_P")
_R = TypeVar("_R")


class LostTransactionError(StoreError):
    """The connection was lost, or not to be waited for; nothing of the transaction was written."""


def repeated(transaction: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that runs one transaction, to repeat it if the connection is lost."""

    @functools.wraps(transaction)
    def run(*args: _P.args, **keywords: _P.kwargs) -> _R:
        until = time.monotonic() + WAIT_S
        while True:
            try:
                return transaction(*args, **keywords)
            except LostTransactionError:
                if time.monotonic() > until:
                    raise

    return run


def connect_again(engine: Engine, location: Location) -> Connection:
    """Connect to a server; wait for it if it does not answer, and print one message about that.

    Args:
        engine: The engine of the database.
        location: The store, for the message.

    Raises:
        OperationalError: The server did not answer within ``WAIT_S``.
    """
    until = time.monotonic() + WAIT_S
    pause_s = _FIRST_PAUSE_S
    waiting = False
    while True:
        try:
            return engine.connect()
        except OperationalError as error:
            if time.monotonic() > until:
                raise
            if not waiting:
                reason = location.without_secrets(" ".join(str(error.orig).split()))
                print_line(
                    f"{location.name} does not answer; waiting for it, for at most "
                    f"{WAIT_S / 60:.0f} minutes: {reason}"
                )
        waiting = True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def transaction_number(connection: Connection) -> str | None:
    """Return the number of the open transaction in PostgreSQL; ``None`` for other databases."""
    if connection.dialect.name != "postgresql":
        return None
    return str(connection.execute(text("SELECT CAST(txid_current() AS text)")).scalar())


def was_committed(engine: Engine, number: str, location: Location) -> bool | None:
    """Return whether transaction ``number`` was written, as the server says after the outage.

    ``None`` if that is unknown.

    Raises:
        OperationalError: The server did not answer within ``WAIT_S``.
    """
    query = text("SELECT txid_status(CAST(:number AS bigint))")
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with connect_again(engine, location) as connection:
            status = connection.execute(query, {"number": number}).scalar()
        if status in ("committed", "aborted"):
            return bool(status == "committed")
        time.sleep(_FIRST_PAUSE_S)  # the server has not noticed yet that the connection ended
    return None
