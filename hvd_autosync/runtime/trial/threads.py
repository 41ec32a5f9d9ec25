"""The number of threads of torch, if the script chooses it."""

from __future__ import annotations

import os

import torch

from hvd_autosync.runtime import current
from hvd_autosync.search_space.families.transport import THREADS_VARIABLE


class ScriptThreads:
    """Whether the script chooses the number of threads: by torch's function, or by the variable.

    Torch reads the variable when it is loaded. In a forked trial that was before the script, which
    may set it in its first lines; it is followed then, as in a process of its own.
    """

    def __init__(self) -> None:
        self._number = torch.get_num_threads()

    def follow(self) -> None:
        """Let torch have the number that it would have, had the script loaded it."""
        if not current.torch_was_loaded or torch.get_num_threads() != self._number:
            return
        value = os.environ.get(THREADS_VARIABLE, "")
        if self._variable_changed() and value.isdecimal():
            torch.set_num_threads(max(int(value), 1))

    def chosen(self) -> bool:
        """Return whether the script has chosen the number so far."""
        return torch.get_num_threads() != self._number or self._variable_changed()

    def _variable_changed(self) -> bool:
        given = current.threads_variable
        return given is not None and os.environ.get(THREADS_VARIABLE, "") != given
