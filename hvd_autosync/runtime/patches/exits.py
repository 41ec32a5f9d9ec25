"""Finds where a script ends by itself: at the end of Python, or by ``os._exit(0)`` without it.

One that ends after an operation has failed does not, also if it has caught the error.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import NoReturn

from hvd_autosync.runtime import current
from hvd_autosync.util import patches


def call_at_exit(ending: Callable[[], None]) -> None:
    """Call a function when this process ends by itself; also where a child that it forks does.

    Args:
        ending: The function. The first one that is given is called.
    """
    atexit.register(ending)

    def watching(leave: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
        @functools.wraps(leave)
        def leaving(status: int) -> NoReturn:
            try:
                if status == 0:
                    ending()
            finally:
                leave(status)

        return leaving

    patches.install("end without clean-up", watching)


def watch_failed_operations() -> None:
    """Let live tuning know of each operation of Horovod's that fails, the script's own included."""

    def noting(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def noted_init(self: Exception, *args: object) -> None:
            init(self, *args)
            if current.live is not None:
                current.live.step_failed()

        return noted_init

    patches.install("failed operations", noting)
