"""Horovod is initialized again in a job whose ``init()`` was special: ``... KIND``.

``list``: of ranks. ``reversed``: a communicator in which the ranks are in reverse order. ``freed``:
such a one, which the script has freed. ``no mpi4py``: there is none. ``sets``: process sets, of
which the script removes the first later.
"""

import os
import sys

import horovod.torch as hvd
import torch

from hvd_autosync.runtime.collectives.initialization import (
    record_initialization,
    registered_process_sets,
)
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
sets = []
if kind == "sets":
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
hvd.init(comm=comm, process_sets=sets)
if kind == "freed":
    comm.Free()


def gathered():
    """Number of the rank in the launcher's order, in Horovod's order."""
    return hvd.allgather(torch.tensor([number]), name="ranks").tolist()


number = 1 - hvd.rank() if kind in ("reversed", "freed") else hvd.rank()
if kind == "reversed":
    assert number == MPI.COMM_WORLD.rank


def check_sets():
    """Each of the script's objects is the one set of its ranks, and those can use it."""
    known = registered_process_sets()
    assert sorted(known.values()) == [each.ranks for each in sets]
    for each in sets:
        assert known[each.process_set_id] == each.ranks
        assert each.included() == (hvd.rank() in each.ranks)
        if each.included():
            total = hvd.allreduce(torch.tensor(7), op=hvd.Sum, name="own", process_set=each)
            assert total == 7 and each.size() == 1


before = gathered()
check_sets()
for place in range(3):
    if place == 1 and sets:
        assert hvd.remove_process_set(sets.pop(0))  # so that the other one has its number next
    refusal = check_reinitialize({})
    try:
        reinitialize({"HOROVOD_CACHE_CAPACITY": "7"})
        assert refusal is None
    except CannotReinitializeError as error:
        assert refusal in str(error)
        print(f"{error.message} {error.hint}", flush=True)
    check_sets()
    assert gathered() == before == ([1, 0] if kind in ("reversed", "freed") else [0, 1])
print("done", flush=True)
