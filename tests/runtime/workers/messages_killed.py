"""Rank 1 is killed while ranks have an endpoint; the others print what ``check`` raises."""

import os
import signal
import time

import horovod.torch as hvd

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.collectives.messaging import open_endpoint

# The launcher ends the other ranks when one was killed, perhaps before they have printed.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
hvd.init()
endpoint = open_endpoint("killed", lambda *message: None)
endpoint.send(1, b"", memoryview(bytes(1000)))
hvd.barrier()
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    for _ in range(6000):
        endpoint.check()
        time.sleep(0.01)
except AutosyncError as error:
    print("raised:", error.message, flush=True)
