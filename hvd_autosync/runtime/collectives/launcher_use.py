"""Whether a script depends on the launcher of its ranks, and so on Horovod's controller.

A script that uses mpi4py sees the ranks of MPI's launcher. Under Gloo there is none, and each
process is a world of one rank. Likewise variables as ``OMPI_COMM_WORLD_RANK`` are those of one
launcher, and ``HOROVOD_RANK`` those of the other. So what such a script does with its data depends
on the controller.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_MODULE = "mpi4py.MPI"
#: Ranks and numbers of ranks, as one launcher sets them and others do not.
_OF_LAUNCHERS = re.compile(
    r"\b(?:(?:OMPI|MV2)_COMM_WORLD_\w+|PMIX?_(?:LOCAL_)?(?:RANK|SIZE|ID)|MPI_LOCALN?RANKS?\w*"
    r"|HOROVOD_(?:LOCAL_|CROSS_)?(?:RANK|SIZE))\b"
)
#: Packages whose own use of it is none of the script's.
_OURS = ("mpi4py", "hvd_autosync", "horovod")

#: The process in which the first import was ours; 0: none.
_imported_by = 0


def import_mpi4py() -> None:
    """Import mpi4py, if it is installed, in a job under MPI; this initializes MPI.

    MPI is finalized where the process ends, unless an exception ends it: that waits for all other
    ranks, and mpirun ends them at once if a rank ends without it. Call it before ``hvd.init()``, so
    that it comes after Horovod's own end.
    """
    global _imported_by
    if sys.modules.get(_MODULE) is None:
        # It raises RuntimeError where it finds no library.
        with contextlib.suppress(ImportError, RuntimeError):
            import mpi4py

            mpi4py.rc(finalize=False)
            import mpi4py.MPI

            _imported_by = os.getpid()
            atexit.register(_end_mpi)


def finalize_mpi() -> None:
    """Finalize MPI if :func:`import_mpi4py` has initialized it in this process."""
    if _imported_by == os.getpid():
        mpi = sys.modules[_MODULE]
        if mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()


def _end_mpi() -> None:
    if getattr(sys, "last_value", None) is None:
        finalize_mpi()


def script_needs_launcher() -> bool:
    """Return whether the script depends on its launcher.

    Either it or a library of its has imported mpi4py, or a file of the script names a variable that
    some launchers set.
    """
    return _uses_mpi4py() or any(map(_names_variable, _files_of_script()))


def _files_of_script() -> Iterator[Path]:
    """Yield the files of modules that were imported, but those of installed packages."""
    libraries = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    paths = {*libraries, *site.getsitepackages(), site.getusersitepackages()}
    installed = {form for path in map(Path, paths) for form in (path, path.resolve())}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or name.partition(".")[0] in _OURS:
            continue
        file = Path(path)
        forms = (file, file.resolve())
        if name == "__main__" or (
            path.endswith(".py")
            and not any(form.is_relative_to(each) for form in forms for each in installed)
        ):
            yield file


def _names_variable(file: Path) -> bool:
    try:
        return _OF_LAUNCHERS.search(file.read_text(errors="replace")) is not None
    except OSError:
        return False


def _uses_mpi4py() -> bool:
    if sys.modules.get(_MODULE) is None:
        return False
    if not _imported_by:
        return True
    modules = [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] not in _OURS
    ]
    return any(_is_of_mpi4py(value) for module in modules for value in list(vars(module).values()))


def _is_of_mpi4py(value: object) -> bool:
    # Not isinstance(), which asks the value, and some say then that they are deprecated.
    if issubclass(type(value), ModuleType):
        name = getattr(value, "__name__", "")
    else:
        name = getattr(type(value), "__module__", "")
    return isinstance(name, str) and name.partition(".")[0] == "mpi4py"
