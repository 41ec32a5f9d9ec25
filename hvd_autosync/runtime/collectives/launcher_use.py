"""Who has imported mpi4py: the script, or only we.

A script that uses it sees the ranks of MPI's launcher. Under Gloo there is none, and each process
is a world of one rank. So what such a script does with its data depends on the controller.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType

_MODULE = "mpi4py.MPI"
#: Packages whose own use of it is none of the script's.
_OURS = ("mpi4py", "hvd_autosync", "horovod")

#: Whether the first import was ours.
_imported_here = False


def import_mpi4py() -> None:
    """Import mpi4py, if it is installed, in a job under MPI; this initializes MPI."""
    global _imported_here
    if sys.modules.get(_MODULE) is None:
        with contextlib.suppress(ImportError):
            import mpi4py.MPI  # noqa: F401

            _imported_here = True


def script_uses_mpi4py() -> bool:
    """Return whether the script, or a library that it uses, has imported mpi4py."""
    if sys.modules.get(_MODULE) is None:
        return False
    if not _imported_here:
        return True
    modules = [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] not in _OURS
    ]
    return any(_is_of_mpi4py(value) for module in modules for value in list(vars(module).values()))


def _is_of_mpi4py(value: object) -> bool:
    kind = value if isinstance(value, ModuleType) else type(value)
    name = getattr(kind, "__name__" if kind is value else "__module__", "")
    return isinstance(name, str) and name.partition(".")[0] == "mpi4py"
