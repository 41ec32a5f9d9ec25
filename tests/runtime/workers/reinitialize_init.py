"""Horovod is initialized again in a job whose ``init()`` was special: ``... KIND``.

``list``: of ranks. ``reversed``: a communicator in which the ranks are in reverse order. ``freed``:
such a one, which the script has freed. ``no mpi4py``: there is none.
"""

import sys

import horovod.torch as hvd
import torch

from hvd_autosync.runtime.collectives.initialization import record_initialization
from hvd_autosync.runtime.collectives.reinitialize import (
    CannotReinitializeError,
    check_reinitialize,
    reinitialize,
)

kind = sys.argv[1]
if kind == "no mpi4py":
    sys.modules["mpi4py"] = sys.modules["mpi4py.MPI"] = None
record_initialization()
comm = None
if kind == "list":
    comm = [0, 1]
elif kind in ("reversed", "freed"):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)
hvd.init(comm=comm)
if kind == "freed":
    comm.Free()


def gathered():
    """Number of the rank in the launcher's order, in Horovod's order."""
    return hvd.allgather(torch.tensor([number]), name="ranks").tolist()


number = 1 - hvd.rank() if kind in ("reversed", "freed") else hvd.rank()
if kind == "reversed":
    assert number == MPI.COMM_WORLD.rank
before = gathered()
for _ in range(3):
    refusal = check_reinitialize({})
    try:
        reinitialize({"HOROVOD_CACHE_CAPACITY": "7"})
        assert refusal is None
    except CannotReinitializeError as error:
        assert refusal in str(error)
        print(f"{error.message} {error.hint}", flush=True)
    assert gathered() == before == ([1, 0] if kind in ("reversed", "freed") else [0, 1])
print("done", flush=True)
