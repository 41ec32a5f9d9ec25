"""Installs the runtime: waits for ``horovod.torch``, then activates it.

It imports only the standard library, numpy and the modules that describe strategies, so that a
process that never imports Horovod pays a few milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hvd_autosync.runtime import current
from hvd_autosync.runtime.driver.sender import Sender
from hvd_autosync.search_space.families.transport import THREADS_VARIABLE
from hvd_autosync.search_space.horovod_settings import RANK_VARIABLES
from hvd_autosync.search_space.sync_plan import beyond_horovod
from hvd_autosync.util import patches
from hvd_autosync.util.import_hook import when_imported
from hvd_autosync.util.variables import LOG_VARIABLE

if TYPE_CHECKING:
    from hvd_autosync.search_space import TrialSpec

#: Packages that load torch.
_OF_TORCH = ("horovod", "torch", "torchvision")
#: Place of the level of a relative import among ``__import__``'s arguments after the name.
_LEVEL = 3


def install(spec: TrialSpec) -> None:
    """Take part in the job as ``spec`` says, as soon as ``horovod.torch`` is imported.

    A training that is neither watched nor summarized, under a strategy without an exchange plan, is
    left untouched: its environment has all that it needs.

    Args:
        spec: The trial; ``measured_steps == 0`` means the real training.
    """
    if os.environ.get(LOG_VARIABLE):
        _start_log()
    current.began_at = time.monotonic()
    current.trial, current.strategy = spec.measured_steps > 0, spec.strategy
    needed = current.trial or spec.watched or spec.summarized
    if not needed and not beyond_horovod(spec.strategy):
        return
    _watch_threads()
    # Duplicated before the script can redirect or close its standard error.
    sender = Sender(os.dup(2), spec.key) if current.trial else None

    def activate(_: ModuleType) -> None:
        from hvd_autosync.runtime.install import activation

        activation.activate(spec, sender)

    when_imported("horovod.torch", activate)
    if not current.trial and beyond_horovod(spec.strategy):
        when_imported("torch.nn.modules.batchnorm", _count_layers)


def _watch_threads() -> None:
    """Note the variable of torch's threads now, and when torch is imported."""
    current.torch_was_loaded = "torch" in sys.modules
    current.threads_variable, current.threads_at_import = _threads_variable(), None
    current.loaded_threads, current.script_set_threads = None, False
    if not current.torch_was_loaded:
        when_imported("torch", _note_loading)


def watch_first_import() -> None:
    """Note, in a forked trial, the variable of torch's threads where the script imports torch.

    Torch is loaded there already, so no finder is asked for it. Call it right before the script.
    """
    if not (current.trial and current.torch_was_loaded):
        return

    def watching(imports: Callable[..., ModuleType]) -> Callable[..., ModuleType]:
        @functools.wraps(imports)
        def watched(name: str, *arguments: Any, **options: Any) -> ModuleType:
            relative = options.get("level") or (arguments[_LEVEL:] and arguments[_LEVEL])
            of_torch = name == "hvd_autosync.torch" or name.partition(".")[0] in _OF_TORCH
            if of_torch and not relative:
                if current.threads_at_import is None:
                    _note_import()
                patches.uninstall("first import of torch")
            return imports(name, *arguments, **options)

        return watched

    patches.install("first import of torch", watching)


def _note_loading(torch: ModuleType) -> None:
    _note_import()
    current.loaded_threads = torch.get_num_threads()


def _note_import() -> None:
    current.threads_at_import = _threads_variable()


def _threads_variable() -> str:
    return os.environ.get(THREADS_VARIABLE, "")


def _start_log() -> None:
    """Start this rank's log; the driver has refused invalid levels, which are ignored here."""
    from hvd_autosync.util.log import start_log

    with contextlib.suppress(ValueError):
        start_log(
            next((f"rank {os.environ[v]}" for v in RANK_VARIABLES if v in os.environ), "rank ?")
        )


def _count_layers(_: ModuleType) -> None:
    """Record normalization layers for the guard's snapshots, before any can be created."""
    from hvd_autosync.runtime.state.normalization import count_layers

    count_layers()


def install_live() -> None:
    """Tune the training of this rank in its own steps, once ``horovod.torch`` is imported."""
    if os.environ.get(LOG_VARIABLE):
        _start_log()
    folder = ""
    with contextlib.suppress(OSError):  # it was deleted
        folder = str(Path.cwd())  # the script may change it before the import

    def activate(module: ModuleType) -> None:
        from hvd_autosync.runtime.install import live_activation

        live_activation.activate_live(folder)

    when_imported("horovod.torch", activate)
