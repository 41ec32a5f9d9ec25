"""Finds where a script evaluates: it puts a module into evaluation mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hvd_autosync.util import patches

#: What is called, in the order in which it was given.
_BEGINS: list[Callable[[], None]] = []


def watch_evaluation(begins: Callable[[], None]) -> None:
    """Call a function whenever the script calls ``eval()`` of a module.

    Args:
        begins: The function; those that were given before are called, too.
    """
    _BEGINS.append(begins)

    def watching(eval_mode: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(eval_mode)
        def watched(self: Any) -> Any:
            for each in _BEGINS:
                each()
            return eval_mode(self)

        return watched

    patches.install("evaluation", watching, undo=_BEGINS.clear)
