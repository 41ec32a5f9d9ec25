"""Methods as hooks and modules hold them, which may outlive the object."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A bound method that does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call
