from __future__ import annotations

import itertools
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from hvd_autosync.runtime.driver import sender as module
from hvd_autosync.runtime.driver.decoder import MessageDecoder
from hvd_autosync.runtime.driver.messages import End, Hello, Profile
from hvd_autosync.runtime.driver.sender import Sender
from hvd_autosync.search_space import ModelProfile
from hvd_autosync.search_space.records import Record

HELLO = {"type": "hello", "host": "a", "device": "cpu"}
END = {"type": "end", "cause": "steps", "peak_memory_bytes": 1}
STEPS = {"type": "steps", "first": 0, "step_s": [], "blocked_s": [], "losses": []}

StartWorker = Callable[..., subprocess.Popen[bytes]]


def read(fd: int) -> tuple[list[tuple[int, Record]], bytes]:
    """All messages of a pipe whose other end is closed, and the rest."""
    decoder, messages, rest = MessageDecoder("key", 8), [], b""
    with open(fd, "rb") as stream:
        for line in stream:
            ours, complete = decoder.feed(line)
            messages += [complete] if complete else []
            rest += b"" if ours else line
    return messages, rest


def test_messages_arrive_between_unfinished_lines() -> None:
    reading, writing = os.pipe()
    sender = Sender(writing, "key")
    os.write(writing, b"10 %")
    sender.send(lambda: HELLO)
    os.write(writing, b"20 %")
    sender.send(lambda: END)
    os.close(writing)
    messages, rest = read(reading)
    assert [type(message) for _, message in messages] == [Hello, End]
    assert rest.split() == [b"10", b"%", b"20", b"%"]


@pytest.mark.parametrize("blocking", [True, False])
def test_long_messages_arrive_whole_from_several_threads(blocking: bool) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, blocking)
    sender = Sender(writing, "key")
    # More than a pipe holds, even when compressed.
    names = [os.urandom(1000).hex() for _ in range(100)]

    def send() -> None:
        for _ in range(3):
            sender.send(lambda: {"type": "profile", "profile": {}, "owned": names})

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
    closer = threading.Thread(target=lambda: [t.join() for t in threads] and os.close(writing))
    closer.start()
    messages, rest = read(reading)
    closer.join()
    assert [m for _, m in messages] == [Profile(ModelProfile(), tuple(names))] * 9
    assert not rest.strip()


def test_news_are_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_INTERVAL_S", 0.02)
    reading, writing = os.pipe()
    sender, enough, asked = Sender(writing, "key"), threading.Event(), itertools.count(1)

    def news() -> dict[str, Any]:
        if next(asked) == 3:
            enough.set()
        return STEPS

    sender.start(3, news)
    assert enough.wait(120)
    (thread,) = [t for t in threading.enumerate() if t.name == "hvd-autosync-sender"]
    sender.stop()
    thread.join(120)
    assert not thread.is_alive()
    os.close(writing)
    messages, _ = read(reading)
    assert {rank for rank, _ in messages} == {3}
    assert len(messages) == next(asked) - 1 >= 3


@pytest.mark.cluster
def test_a_rank_without_a_driver_ends_itself(start_worker: StartWorker) -> None:
    worker = start_worker("train.py", "--loader", "--step-s", "0.01", measured_steps=10**6)
    assert worker.stdout is not None and worker.stderr is not None
    lines = iter(worker.stdout.readline, b"")
    pids = next(x for x in lines if x.startswith(b"pids")).decode().split()[1:]
    processes = [psutil.Process(int(each.partition(":")[0])) for each in pids]
    worker.stderr.close()
    worker.stdout.close()
    assert worker.wait(timeout=120) == 69
    deadline = time.monotonic() + 120
    while any(each.is_running() for each in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(each.is_running() for each in processes)
