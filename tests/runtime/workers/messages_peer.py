"""Rank 1 of two, not one of Horovod's: prints its endpoint info, reads both, ends on command."""

import json
import os
import sys
import time

from hvd_autosync.runtime.collectives import endpoint as module
from hvd_autosync.runtime.collectives import transport_zmq
from hvd_autosync.runtime.collectives.endpoint import Endpoint
from hvd_autosync.runtime.collectives.transport_zmq import ZmqTransport

manner = sys.argv[1]
if manner != "hang":  # its last words arrive, however late it gets a processor
    module._ABORT_TIMEOUT_S = module._FLUSH_TIMEOUT_S = 120.0
    transport_zmq._FLUSH_TIMEOUT_MS = 120_000
else:  # its thread never ends
    module._ABORT_TIMEOUT_S = 0.3


def on_message(source: int, head: bytes, body: memoryview) -> None:
    if head == b"hang":
        endpoint._transport.send(0, b"Lhanging", memoryview(b""))
        while True:
            time.sleep(1)


transport = ZmqTransport("127.0.0.1")
print(transport.endpoint_info, flush=True)
endpoint_infos = json.loads(sys.stdin.readline())
transport.connect(1, endpoint_infos)
endpoint = Endpoint(1, len(endpoint_infos), transport, on_message)
endpoint.await_connections(120)
child = os.fork() if manner == "fork" else 0
if manner == "fork" and child == 0:
    time.sleep(300)
    os._exit(0)
print(child, flush=True)
sys.stdin.readline()
if manner != "hang":
    endpoint.send(0, b"last")
if manner == "raise":
    raise RuntimeError("bad data")
