"""The last rank gets a signal while Horovod is initialized again: ``... SIGNAL``.

The other ranks must not outlive it.
"""

import os
import signal
import sys

import horovod.torch as hvd
from horovod.torch import mpi_ops

from hvd_autosync.runtime.collectives.initialization import record_initialization
from hvd_autosync.runtime.collectives.reinitialize import reinitialize

record_initialization()
hvd.init()
reinitialize({})
if hvd.rank() == hvd.size() - 1:
    shutdown = mpi_ops.shutdown

    def stopping():
        shutdown()
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))

    mpi_ops.shutdown = stopping
print("now", flush=True)
reinitialize({})
print("never reached")
