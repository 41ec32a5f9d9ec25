"""Whether a script depends on the launcher of its ranks, and so on Horovod's controller.

A script that uses mpi4py sees the ranks of MPI's launcher. Under Gloo there is none, and each
process is a world of one rank. Likewise variables as ``OMPI_COMM_WORLD_RANK`` are those of one
launcher, and ``HOROVOD_RANK`` those of the other. So what such a script does with its data depends
on the controller.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from hvd_autosync.util import patches

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
#: Whether MPI is being finalized, or was.
_finalizing = False


def import_mpi4py() -> None:
    """Import mpi4py, if it is installed, in a job under MPI; this initializes MPI.

    It is not finalized where Python ends: that is for :func:`finalize_at_end`.
    """
    global _imported_by
    if sys.modules.get(_MODULE) is None:
        try:
            import mpi4py

            mpi4py.rc(finalize=False)
            import mpi4py.MPI
        except ImportError:
            return
        except RuntimeError:  # it finds no library of MPI's
            mpi4py.rc(finalize=None)
            return
        _imported_by = os.getpid()


def finalize_at_end() -> None:
    """Finalize MPI where this process ends, if our import has initialized it.

    Horovod's ``shutdown()`` leaves alone an MPI that it has not initialized. To finalize it waits
    for all other ranks. So a rank that an exception ends does without, and mpirun ends the others.
    Call it before anything else that is done at the end of the process.
    """
    patches.install("end of MPI", _ending, undo=lambda: atexit.unregister(_end_mpi))


def finalize_mpi() -> None:
    """Finalize MPI, once, where mpi4py has initialized it."""
    global _finalizing
    mpi = sys.modules.get(_MODULE)
    if mpi is not None and not _finalizing and mpi.Is_initialized() and not mpi.Is_finalized():
        _finalizing = True
        mpi.Finalize()


def _end_mpi() -> None:
    if _imported_by == os.getpid() and getattr(sys, "last_value", None) is None:
        finalize_mpi()


def _ending(leave: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    atexit.register(_end_mpi)

    @functools.wraps(leave)
    def leaving(status: int) -> NoReturn:
        try:
            horovod = sys.modules["horovod.torch.mpi_ops"]
            # Horovod itself would have finalized it in its shutdown().
            if status == 0 and _imported_by == os.getpid() and not horovod.is_initialized():
                finalize_mpi()
        finally:
            leave(status)

    return leaving


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
