"""Rank 1 of two, which is no rank of Horovod's: says its card, reads both, and ends as told."""

import json
import os
import sys
import time

from hvd_autosync.runtime.collectives.endpoint import Endpoint
from hvd_autosync.runtime.collectives.transport_zmq import ZmqTransport

manner = sys.argv[1]


def on_message(source: int, head: bytes, body: memoryview) -> None:
    if head == b"hang":
        endpoint._carrier.send(0, b"Lhanging", memoryview(b""))
        while True:
            time.sleep(1)


carrier = ZmqTransport("127.0.0.1")
print(carrier.card, flush=True)
cards = json.loads(sys.stdin.readline())
carrier.connect(1, cards)
endpoint = Endpoint(1, len(cards), carrier, on_message)
endpoint.await_connections(60)
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
