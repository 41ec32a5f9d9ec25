"""Imported by the ``.pth`` file in two kinds of process only, at Python's start.

In Horovod's launcher it lets the plugin add its options; in a worker of ours it lets the runtime
take part as soon as the script imports ``horovod.torch``. Importing this module does the work.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from hvd_autosync.search_space.horovod_settings import RANK_VARIABLES

_LAUNCHER = "horovod.runner.launch"
#: ``python -m horovod.runner.launch`` runs this in place of the module's own code, so that the
#: launcher is imported, plugin and all, instead of executed as ``__main__``.
_RUN_LAUNCHER = f"from {_LAUNCHER} import run_commandline\nrun_commandline()\n"


class _LauncherLoader(Loader):
    """Loads Horovod's launcher and lets the plugin extend it."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        from hvd_autosync.plugin import extend_launcher

        extend_launcher(module)

    def get_code(self, name: str) -> CodeType:
        """Called by ``runpy`` only."""
        return compile(_RUN_LAUNCHER, f"<{_LAUNCHER}>", "exec")


class _LauncherFinder(MetaPathFinder):
    """Finds Horovod's launcher where the other finders find it, once."""

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LAUNCHER:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)  # type: ignore[arg-type]
            if spec is not None and spec.loader is not None:
                spec.loader = _LauncherLoader(spec.loader)
                return spec
        return None


def _is_launcher() -> bool:
    """Whether this process is ``horovodrun`` or ``python -m horovod.runner.launch``."""
    words = sys.orig_argv[1:6]
    return any(w.endswith("horovodrun") or w.startswith("horovod.runner") for w in words)


def _start() -> None:
    # The launcher of a trial has the trial's variables too; only workers have a rank.
    if any(name in os.environ for name in RANK_VARIABLES):
        from hvd_autosync.launch.worker_environment import spec_from_environment

        spec = spec_from_environment()
        if spec is not None:
            from hvd_autosync.runtime.hooks import install

            install(spec)
    elif _is_launcher():
        sys.meta_path.insert(0, _LauncherFinder())


_start()
