"""A rank ends before the other: ``... KIND``.

``fails``: rank 1 by an exception. ``leaves``: without clean-up, after it has shut Horovod down.
``ends``: rank 1, before the other, which has a function for the end of Python.
"""

import os
import sys
import time

import horovod.torch as hvd
import torch

from hvd_autosync.runtime.collectives.initialization import record_initialization
from hvd_autosync.runtime.patches.exits import call_at_exit

record_initialization()
call_at_exit(lambda: print("noted", flush=True))
hvd.init()
hvd.allreduce(torch.ones(1), name="one")
first = hvd.rank() == 0
if sys.argv[1] == "fails":
    if not first:
        raise RuntimeError("deliberate")
    time.sleep(120)
if sys.argv[1] == "ends":
    if first:
        time.sleep(3)
        print("woke", flush=True)
    sys.exit()
hvd.shutdown()
if first:
    time.sleep(3)
    print("saved", flush=True)
os._exit(0)
