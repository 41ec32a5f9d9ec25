"""Imports modules in a fork server before it forks, so that its children need not.

First come torch and Horovod; after a trial also the modules that the script imported from installed
packages. Excluded are the script's own modules, which may change or have side effects, and modules
that start threads or initialize an accelerator, which do not survive a fork. A child process tests
that before. A module may read variables when it is imported, so it gets those that the script had
set before it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import sys
import sysconfig
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from hvd_autosync.util.import_hook import spec_of

#: The first use of an optimizer imports ``torch._dynamo``, which takes seconds.
_FRAMEWORKS = (
    "torch",
    "torch._dynamo",
    "torch.utils.data",
    "horovod.torch",
    "psutil",
    "hvd_autosync.runtime.install.activation",
)


#: Environment variables that a script has set, or deleted (``None``).
Changes = dict[str, str | None]
#: Longest time for the test of a script's imports.
_LONGEST_S = 60
#: Lets ``torch.cuda.is_available()``, which libraries call while they are imported, count GPUs
#: without the CUDA runtime: forked children of a process that has used it cannot (PyTorch's page
#: on CUDA environment variables).
_COUNT_WITHOUT_CUDA = "PYTORCH_NVML_BASED_CUDA_CHECK"


class Preloader:
    """Records the imports of a trial, and repeats them in the parent of the next trial.

    Args:
        main: The module that is run as the script, if it is one: it is the script's own wherever it
            is, and its import may be the training.
    """

    def __init__(self, main: str = "") -> None:
        self._seen = {main, f"{main}.__main__"}
        self._memory = os.memfd_create("hvd-autosync-imports")

    def load_frameworks(self) -> None:
        """Import torch and Horovod, without initializing either."""
        os.environ.setdefault(_COUNT_WITHOUT_CUDA, "1")
        for name in _FRAMEWORKS:
            importlib.import_module(name)

    def record(self) -> None:
        """In a child: record each module that is found from now on."""
        os.ftruncate(self._memory, 0)
        sys.meta_path.insert(0, _Recorder(self._memory))

    def load_what_was_imported(self) -> None:
        """In the parent: import the modules of the last child, as far as that is safe."""
        recorded = os.pread(self._memory, os.fstat(self._memory).st_size, 0)
        *complete, _ = recorded.split(b"\n")  # the child may have been killed
        found = {name: (origin, changes) for name, origin, changes in map(json.loads, complete)}
        new = {name: each for name, each in found.items() if name not in self._seen}
        self._seen |= set(new)
        wanted = {
            name: changes for name, (origin, changes) in new.items() if _is_installed(name, origin)
        }
        for name in _safe_imports(wanted) if wanted else []:
            _import_quietly(name, wanted[name])


class _Recorder(MetaPathFinder):
    """Records the name and the origin of each module that the other finders find."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._environment = dict(os.environ)

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = spec_of(finder, fullname, path, target)
            if spec is not None:
                if spec.origin:
                    # Several processes may write: append each line with one call.
                    os.lseek(self._descriptor, 0, os.SEEK_END)
                    line = json.dumps([fullname, spec.origin, self._changes()])
                    os.write(self._descriptor, line.encode() + b"\n")
                return spec
        return None

    def _changes(self) -> Changes:
        """Return the variables that the script has changed so far."""
        now, before = dict(os.environ), self._environment
        names = {name for name in now.keys() | before.keys() if now.get(name) != before.get(name)}
        return {name: now.get(name) for name in sorted(names)}


def _is_installed(name: str, origin: str) -> bool:
    """Return whether a module is installed, and this process would find the same one."""
    folders = [sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib", "stdlib")]
    if not any(origin.startswith(folder) for folder in folders):
        return False
    top, _, rest = name.partition(".")
    spec = None if top == "hvd_autosync" else importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return False
    return (
        origin.startswith(os.path.dirname(spec.origin) + os.sep)
        if rest
        else (origin == spec.origin)
    )


def _safe_imports(wanted: Mapping[str, Changes]) -> list[str]:
    """Return those modules that a child process imported without threads or accelerator.

    Args:
        wanted: Name of a module -> the variables that the script had changed before it.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(_LONGEST_S)  # ends a child whose imports block
            os.close(reader)
            for stream in (0, 1, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)
            with os.fdopen(writer, "w") as good:
                for name, changes in wanted.items():
                    before = _threads()
                    imported = _import_quietly(name, changes)
                    if _threads() != before or _accelerator():
                        break  # later modules cannot be tested here
                    if imported:
                        print(name, file=good, flush=True)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as good:
        result = good.read().split()
    os.waitpid(child, 0)
    return result


def _import_quietly(name: str, changes: Changes) -> bool:
    """Import a module under the variables that the script had set before it."""
    before = {variable: os.environ.get(variable) for variable in changes}
    _set_variables(changes)
    try:
        importlib.import_module(name)
    except BaseException:  # the script will get it, too, and may expect it
        return False
    finally:
        # What the module itself has set stays.
        kept = {v for v, value in changes.items() if os.environ.get(v) == value}
        _set_variables({variable: before[variable] for variable in kept})
    return True


def _set_variables(values: Changes) -> None:
    for variable, value in values.items():
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _accelerator() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())
