"""The last rank gets a signal while Horovod is initialized again: ``... SIGNAL MOMENT [HANDLER]``.

``MOMENT``: ``before`` Horovod is shut down, ``between`` that and the new initialization, or
``inside`` the latter. With ``HANDLER``, the script handles SIGTERM. The other ranks must not
outlive the last one.
"""

import os
import signal
import sys
import threading
import time

import horovod.torch as hvd
from horovod.torch import mpi_ops

from hvd_autosync.runtime.collectives.initialization import record_initialization
from hvd_autosync.runtime.collectives.reinitialize import reinitialize

number, moment, *handled = sys.argv[1:]
if handled:
    signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
record_initialization()
hvd.init()
reinitialize({})


def stop():
    os.kill(os.getpid(), getattr(signal, number))


if hvd.rank() == hvd.size() - 1:
    shutdown = mpi_ops.shutdown

    def stopping():
        if moment == "before":
            stop()
        shutdown()
        if moment == "between":
            stop()
        threading.Timer(0.001, stop).start()

    mpi_ops.shutdown = stopping
print("now", time.time(), flush=True)
reinitialize({})
print("never reached")
