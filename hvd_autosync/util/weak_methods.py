"""Methods as hooks and modules hold them, which may outlive the object; and its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a bound method that does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call


def once_gone(owner: object, close: Callable[[], object]) -> Callable[[], object]:
    """Call ``close`` when ``owner`` is gone, but not at the end of the process.

    Returns:
        Calls it before; it is called once.
    """
    closing = weakref.finalize(owner, close)
    closing.atexit = False
    return closing
