"""A listener in front of another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_autosync.engine.tuning import Listener


class ForwardingListener:
    """Forwards all events to another listener; subclasses add to some of them."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __getattr__(self, name: str) -> Callable[..., None]:
        event: Callable[..., None] = getattr(self._listener, name)
        return event
