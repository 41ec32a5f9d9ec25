"""Ranks that sleep while they wait, on a machine that others use, too."""

from __future__ import annotations

import time

from horovod.torch import mpi_ops

_NAP_S = 0.0005


def wait_asleep() -> None:
    """Let ranks sleep while they wait for an operation of Horovod's.

    Horovod's own waiting never sleeps (``WaitAndClear`` in its ``torch/mpi_ops_v2.cc``); where
    there are more ranks than processors it holds up those that it waits for.
    """
    waits, poll = mpi_ops.mpi_lib.horovod_torch_wait_and_clear, mpi_ops.mpi_lib.horovod_torch_poll

    def wait(handle: int) -> None:
        while not poll(handle):
            time.sleep(_NAP_S)
        waits(handle)

    mpi_ops.mpi_lib.horovod_torch_wait_and_clear = wait
