"""The capabilities of this machine's Horovod, found without initializing it."""

from __future__ import annotations

import shutil
from functools import cache

from hvd_autosync.errors import HorovodBuildError
from hvd_autosync.search_space import HorovodBuild
from hvd_autosync.util.program import search_path


@cache
def horovod_build() -> HorovodBuild:
    """Return the capabilities of the installed Horovod; MPI counts only with an ``mpirun``.

    Raises:
        HorovodBuildError: Horovod's torch extension cannot be imported here.
    """
    try:
        import horovod
        from horovod.torch import mpi_ops
    except Exception as error:  # torch raises OSError if one of its libraries is missing
        what = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise HorovodBuildError(
            f"horovod.torch cannot be imported: {what}",
            hint="Install Horovod 0.28 with its PyTorch extension into this environment, and make "
            "`import torch` work.",
        ) from None
    return HorovodBuild(
        version=horovod.__version__,
        gloo=bool(mpi_ops.gloo_built()),
        mpi=mpi_built() and _has_mpirun(),
        nccl=bool(mpi_ops.nccl_built()),
    )


def mpi_built() -> bool:
    """Return whether Horovod was built with MPI, with or without an ``mpirun``."""
    from horovod.torch import mpi_ops

    return bool(mpi_ops.mpi_built())


def default_controller(build: HorovodBuild) -> str:
    """Return the controller that ``horovodrun`` uses without an option (``launch.py``)."""
    return "mpi" if build.mpi else "gloo"


def known_controllers() -> list[str]:
    """Return the controllers that :func:`horovod_build` has found; none before it was called."""
    if not horovod_build.cache_info().currsize:
        return []
    build = horovod_build()
    return [name for name, present in (("gloo", build.gloo), ("mpi", build.mpi)) if present]


def _has_mpirun() -> bool:
    """Return whether the launcher will find an ``mpirun``."""
    return shutil.which("mpirun", path=search_path()) is not None
