"""A database server that goes away for a while: it is waited for, and what it lost is repeated.

A transaction whose connection ends before its commit was never written, and can be repeated. One
that was being committed may or may not be; PostgreSQL tells which by the transaction's number.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from hvd_autosync.errors import StoreError

#: Longest time that a server may be away.
WAIT_S = 600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0

_P = ParamSpec("_P")
_R = TypeVar("_R")


class LostTransactionError(StoreError):
    """The connection ended, and nothing of the transaction was written."""


def repeated(transaction: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let ``transaction``, which makes one and does nothing else, begin anew when it was lost."""

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


def connect_again(engine: Engine, name: str) -> Connection:
    """A connection to a server that was there before; waits for it if need be, and says so once.

    Args:
        engine: Connects.
        name: The store's, for the message.

    Raises:
        OperationalError: It did not come back.
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
                reason = " ".join(str(error.orig).split())
                print(
                    f"hvd-autosync: {name} does not answer; waiting for it, for at most "
                    f"{WAIT_S / 60:.0f} minutes: {reason}",
                    file=sys.stderr,
                    flush=True,
                )
        waiting = True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def transaction_number(connection: Connection) -> str | None:
    """What PostgreSQL knows the open transaction by; ``None`` elsewhere."""
    if connection.dialect.name != "postgresql":
        return None
    return str(connection.execute(text("SELECT CAST(txid_current() AS text)")).scalar())


def was_committed(engine: Engine, number: str, name: str) -> bool | None:
    """Whether the transaction ``number`` was written, as the server says when it is back.

    ``None`` where that cannot be told.

    Raises:
        OperationalError: It did not come back.
    """
    query = text("SELECT txid_status(CAST(:number AS bigint))")
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with connect_again(engine, name) as connection:
            status = connection.execute(query, {"number": number}).scalar()
        if status in ("committed", "aborted"):
            return bool(status == "committed")
        time.sleep(_FIRST_PAUSE_S)  # the server has not yet noticed that we are gone
    return None
