"""A rank ends before the other: ``... KIND NOTE``. Rank 1 writes the file ``NOTE`` at its end.

``fails``: rank 1 by an exception. ``leaves``: without clean-up, after it has shut Horovod down.
``ends``: rank 1, before the other, which has a function for the end of Python.
"""

import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

from hvd_autosync.runtime.collectives.initialization import record_initialization
from hvd_autosync.runtime.patches.exits import call_at_exit

note = Path(sys.argv[2])


def at_exit():
    if not first:
        note.touch()
    print("noted", flush=True)


def other_has_noted():
    deadline = time.monotonic() + 60
    while not note.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return note.exists()


record_initialization()
call_at_exit(at_exit)
hvd.init()
hvd.allreduce(torch.ones(1), name="one")
first = hvd.rank() == 0
if sys.argv[1] == "fails":
    if not first:
        raise RuntimeError("deliberate")
    time.sleep(600)
if sys.argv[1] == "ends":
    if first:
        print("noted before" if other_has_noted() else "not noted", flush=True)
    sys.exit()
hvd.shutdown()
if first:
    other_has_noted()
    time.sleep(1)  # in which the other ends, and this one is not ended
    print("saved", flush=True)
os._exit(0)
