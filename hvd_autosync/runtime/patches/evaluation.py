"""Finds where a script evaluates: it puts a module into evaluation mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hvd_autosync.util import patches


def watch_evaluation(begins: Callable[[], None]) -> None:
    """Call a function whenever the script calls ``eval()`` of a module.

    Args:
        begins: The function. The first one that is given is called.
    """

    def watching(eval_mode: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(eval_mode)
        def watched(self: Any) -> Any:
            begins()
            return eval_mode(self)

        return watched

    patches.install("evaluation", watching)
