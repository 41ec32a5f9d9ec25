"""The capabilities of this machine's Horovod, found without initializing it."""

from __future__ import annotations

from functools import cache

from hvd_autosync.errors import HorovodBuildError
from hvd_autosync.launch.command import has_mpirun
from hvd_autosync.search_space import HorovodBuild


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
        mpi=bool(mpi_ops.mpi_built()) and has_mpirun(),
        nccl=bool(mpi_ops.nccl_built()),
    )


def default_controller(build: HorovodBuild) -> str:
    """Return the controller that ``horovodrun`` uses without an option (``launch.py``)."""
    return "mpi" if build.mpi else "gloo"
