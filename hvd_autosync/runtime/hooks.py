"""The way into a worker: wait for ``horovod.torch``, then take part.

Only the standard library, numpy and the language are imported here, so that a process that never
imports Horovod pays a few milliseconds.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from hvd_autosync.runtime.sender import Sender
from hvd_autosync.search_space.horovod_settings import horovod_settings

if TYPE_CHECKING:
    from hvd_autosync.search_space import TrialSpec

_AWAITED = "horovod.torch"


def install(spec: TrialSpec) -> None:
    """Take part in the job as ``spec`` says, as soon as ``horovod.torch`` is imported.

    A training that measures nothing, under a strategy without optimizer arguments, is left
    untouched: everything it needs is in its environment already.

    Args:
        spec: The trial; ``measured_steps == 0`` means the real training.
    """
    if spec.measured_steps == 0 and not horovod_settings(spec.strategy).optimizer:
        return
    # Taken before the script can redirect or close its error output.
    sender = Sender(os.dup(2)) if spec.measured_steps else None
    loaded = sys.modules.get(_AWAITED)
    if loaded is not None:
        _activate(loaded, spec, sender)
    else:
        sys.meta_path.insert(0, _HorovodFinder(spec, sender))


def _activate(module: ModuleType, spec: TrialSpec, sender: Sender | None) -> None:
    from hvd_autosync.runtime.activation import activate

    activate(module, spec, sender)


class _HorovodFinder(MetaPathFinder):
    """Finds ``horovod.torch`` where the other finders find it."""

    def __init__(self, spec: TrialSpec, sender: Sender | None) -> None:
        self._spec = spec
        self._sender = sender

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _AWAITED:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            found = finder.find_spec(fullname, path, target)  # type: ignore[arg-type]
            if found is not None and found.loader is not None:
                found.loader = _HorovodLoader(found.loader, self._spec, self._sender)
                return found
        return None


class _HorovodLoader(Loader):
    """Executes ``horovod.torch`` as its own loader does, and activates the runtime after it."""

    def __init__(self, inner: Loader, spec: TrialSpec, sender: Sender | None) -> None:
        self._inner = inner
        self._spec = spec
        self._sender = sender

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module looks as if we had never been there (inspect, pkgutil, reload).
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        _activate(module, self._spec, self._sender)
