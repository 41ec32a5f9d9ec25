"""Runs an action as soon as a module has been imported, by any code.

This module imports only the standard library, because every worker loads it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType


def when_imported(
    name: str, action: Callable[[ModuleType], None], *, run_as_main: str | None = None
) -> None:
    """Call ``action`` with the module ``name`` after its import; at once if it is imported.

    Several actions for a module are called in the order in which they were given.

    Args:
        name: The module's full name.
        action: Called with the module.
        run_as_main: Source to run instead of the module if it is executed as a program
            (``python -m name``), which does not import it under its name.
    """
    loaded = sys.modules.get(name)
    if loaded is not None:
        action(loaded)
    else:
        sys.meta_path.insert(0, _Finder(name, action, run_as_main))


class _Finder(MetaPathFinder):
    """Finds one module through the other finders, and replaces its loader."""

    def __init__(
        self, name: str, action: Callable[[ModuleType], None], run_as_main: str | None
    ) -> None:
        self._name = name
        self._action = action
        self._run_as_main = run_as_main
        #: Whether it asks the others, among which another one for the same module asks this.
        self._asking = False

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._asking:
            return None
        self._asking = True
        try:
            for finder in sys.meta_path:
                spec = spec_of(finder, fullname, path, target)
                if spec is not None and spec.loader is not None:
                    spec.loader = _ActingLoader(spec.loader, self._action, self._run_as_main)
                    return spec
        finally:
            self._asking = False
        return None


def spec_of(
    finder: object, fullname: str, path: object, target: ModuleType | None
) -> ModuleSpec | None:
    """Return what a finder finds; nothing if it is one of those of before Python 3.4."""
    find = getattr(finder, "find_spec", None)
    return None if find is None else find(fullname, path, target)


class _ActingLoader(Loader):
    """Executes a module with its own loader, and calls the action afterwards."""

    def __init__(
        self, inner: Loader, action: Callable[[ModuleType], None], run_as_main: str | None
    ) -> None:
        self._inner = inner
        self._action = action
        self._run_as_main = run_as_main

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Restore the module's own loader, for inspect, pkgutil and reload.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._action(module)

    def get_code(self, name: str) -> CodeType | None:
        """Return the code for ``runpy``, which executes the module as a program."""
        if self._run_as_main is not None:
            return compile(self._run_as_main, f"<{name}>", "exec")
        code: CodeType | None = self._inner.get_code(name)  # type: ignore[attr-defined]
        return code
