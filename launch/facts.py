"""What this machine's Horovod offers, asked without initializing it."""

from __future__ import annotations

from functools import cache

from hvd_autosync.errors import HorovodBuildError
from hvd_autosync.launch.command import has_mpirun
from hvd_autosync.search_space import HorovodBuild


@cache
def horovod_build() -> HorovodBuild:
    """What the installed Horovod was built with and can start; MPI needs its ``mpirun``.

    Raises:
        HorovodBuildError: Horovod's torch extension cannot be imported here.
    """
    try:
        import horovod
        from horovod.torch import mpi_ops
    except Exception as error:  # torch raises OSError where a library of it is missing
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
    """The controller that ``horovodrun`` takes when none is asked for (``launch.py``)."""
    return "mpi" if build.mpi else "gloo"
