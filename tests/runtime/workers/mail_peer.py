"""Rank 1 of two, which is no rank of Horovod's: says its card, reads both, and ends as told."""

import json
import os
import sys
import time

from hvd_autosync.runtime.collectives.endpoint import Mailbox
from hvd_autosync.runtime.collectives.transport_zmq import ZmqCarrier

manner = sys.argv[1]


def heed(source: int, head: bytes, body: memoryview) -> None:
    if head == b"hang":
        mailbox._carrier.send(0, b"Lhanging", memoryview(b""))
        while True:
            time.sleep(1)


carrier = ZmqCarrier("127.0.0.1")
print(carrier.card, flush=True)
cards = json.loads(sys.stdin.readline())
carrier.connect(1, cards)
mailbox = Mailbox(1, len(cards), carrier, heed)
mailbox.await_connections(60)
child = os.fork() if manner == "fork" else 0
if manner == "fork" and child == 0:
    time.sleep(300)
    os._exit(0)
print(child, flush=True)
sys.stdin.readline()
if manner != "hang":
    mailbox.send(0, b"last")
if manner == "raise":
    raise RuntimeError("bad data")
