"""The number of threads of torch, if the script chooses it."""

from __future__ import annotations

import torch

from hvd_autosync.runtime import current


class ScriptThreads:
    """Whether the script chooses the number of threads: by torch's function, or by the variable.

    Torch reads the variable when it is loaded. In a forked trial that was before the script, which
    may set it before it imports torch; it is followed then, as in a process of its own.
    """

    def __init__(self) -> None:
        self._number = torch.get_num_threads()

    def follow(self) -> None:
        """Let torch have the number that it would have, had the script loaded it."""
        value = current.threads_at_import or ""
        forked, untouched = current.torch_was_loaded, torch.get_num_threads() == self._number
        if forked and untouched and self._variable_changed() and value.isdecimal():
            torch.set_num_threads(max(int(value), 1))

    def chosen(self) -> bool:
        """Return whether the script has chosen the number so far."""
        changed = torch.get_num_threads() != self._number
        return changed or current.script_set_threads or self._variable_changed()

    def _variable_changed(self) -> bool:
        at_import = current.threads_at_import
        return at_import is not None and at_import != current.threads_variable
