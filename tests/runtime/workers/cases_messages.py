"""Messages between ranks, over the transport of the job's controller."""

import contextlib
import os
import queue
import random
import signal
import threading

import horovod.torch as hvd
import torch
from common import raises

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.collectives.messaging import open_endpoint

LONG_S = 120.0
#: Rank ends the process with it open.
LEFT_OPEN = []


@contextlib.contextmanager
def opened(name, on_message=None):
    """An endpoint and the messages that ``on_message`` does not handle; it echoes on request."""
    messages = queue.SimpleQueue()

    def handle_or_keep(source, head, body):
        if on_message is not None:
            on_message(source, head, body)
        if head.startswith(b"ask"):
            endpoint.send(source, b"reply" + head[3:], body)
        else:
            messages.put((source, head, body))

    endpoint = open_endpoint(name, handle_or_keep)
    hvd.barrier()  # on_message() may be called before open_endpoint() returns; not here
    yield endpoint, messages
    endpoint.close()


def case_order_and_sizes_with_everyone_at_once():
    chosen = random.Random(hvd.rank())
    sizes = [0, 1, 5000, 65_536, 20_000_000, *(chosen.randrange(3_000_000) for _ in range(6))]
    with opened("sizes") as (endpoint, messages):
        sent = []
        for number, size in enumerate(sizes):
            for to in range(hvd.size()):
                body = torch.full((size,), (number + hvd.rank()) % 256, dtype=torch.uint8)
                endpoint.send(to, b"ask%d" % number, memoryview(body.numpy()))
                sent.append((to, number, body))
        came = {to: [] for to in range(hvd.size())}
        for _ in sent:
            source, head, body = messages.get(timeout=LONG_S)
            came[source].append((head, torch.frombuffer(body, dtype=torch.uint8) if body else None))
        for to, number, body in sent:
            head, back = came[to][number]
            assert head == b"reply%d" % number
            assert len(body) == 0 if back is None else torch.equal(back, body)
        endpoint.check()


def case_messages_pass_while_ranks_wait_in_collectives_and_compute():
    with opened("beside") as (endpoint, messages):
        other = (hvd.rank() + 1) % hvd.size()
        for number in range(30):
            endpoint.send(other, b"ask%d" % number, memoryview(bytes(100_000)))
            total = hvd.allreduce(torch.ones(50_000), op=hvd.Sum, name=f"beside.{number}")
            assert total[0] == hvd.size()
            torch.randn(200, 200) @ torch.randn(200, 200)
        heads = [messages.get(timeout=LONG_S)[1] for _ in range(30)]
        assert heads == [b"reply%d" % number for number in range(30)]


def case_close_delivers_what_is_under_way():
    count = [0]

    def on_message(source, head, body):
        assert len(body) == 1_000_000
        count[0] += 1

    with opened("under way", on_message) as (endpoint, _):
        for to in range(hvd.size()):
            for _ in range(10):
                endpoint.send(to, b"last", memoryview(bytes(1_000_000)))
    assert count[0] == 10 * hvd.size()
    with raises(AutosyncError, "the endpoint is closed"):
        endpoint.send(0, b"")


def case_several_endpoints_and_uneven_ends():
    with opened("one") as (one, messages_1), opened("two") as (two, messages_2):
        one.send(0, b"1")
        two.send(0, b"2")
        if hvd.rank() == 0:
            ranks = list(range(hvd.size()))
            for messages, head in ((messages_1, b"1"), (messages_2, b"2")):
                came = [messages.get(timeout=LONG_S) for _ in ranks]
                assert sorted(source for source, *_ in came) == ranks
                assert {message[1] for message in came} == {head}
        else:
            threading.Event().wait(0.2)  # closes later than the other


def case_a_failure_of_on_message_is_known_on_all_ranks():
    def on_message(source, head, body):
        if head == b"bad":
            raise KeyError("no such parameter")

    said = "rank 1 failed to handle a message from rank 0: KeyError: 'no such parameter'"
    with raises(AutosyncError, said), opened("failing", on_message) as (endpoint, _):
        if hvd.rank() == 0:
            endpoint.send(1, b"bad", memoryview(bytes(200_000)))
        late = threading.Event()
        for _ in range(int(LONG_S / 0.01)):
            endpoint.check()
            late.wait(0.01)
    with raises(AutosyncError, said):
        endpoint.check()
    endpoint.close()
    hvd.barrier()


def case_forked_children_do_not_use_the_endpoint():
    with opened("forking") as (endpoint, messages):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(AutosyncError):
                endpoint.send(0, b"from a child")
                os._exit(1)
            endpoint.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        loader = torch.utils.data.DataLoader(range(8), num_workers=1)
        assert len(list(loader)) == 8
        endpoint.send((hvd.rank() + 1) % hvd.size(), b"from a parent")
        assert messages.get(timeout=LONG_S)[1] == b"from a parent"


def case_zz_an_open_endpoint_does_not_keep_the_process():
    """The last case: the job must end with status 0 all the same."""
    LEFT_OPEN.append(open_endpoint("left open", lambda *message: None))
    LEFT_OPEN[0].send((hvd.rank() + 1) % hvd.size(), b"last", memoryview(bytes(1_000_000)))
    signal.alarm(2 * int(LONG_S))
