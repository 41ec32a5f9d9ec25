"""Ranks find each other's addresses without asking twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from threading import Event

import pytest

from hvd_autosync.runtime.collectives import rendezvous_server as module
from hvd_autosync.runtime.collectives.rendezvous_server import rendezvous_server


def ask(port: int, method: str, body: bytes | None = None, sent: Event | None = None) -> object:
    """Status and content of an answer for the address of rank 1."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.request(method, "/global_/1", body)
    if sent is not None:
        sent.set()
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_an_answer_waits_for_what_another_rank_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HOLD_S", 120.0)
    with rendezvous_server("127.0.0.1") as port, ThreadPoolExecutor() as pool:
        sent = Event()
        answer = pool.submit(ask, port, "GET", None, sent)
        assert sent.wait(120)
        assert not answer.done()
        assert ask(port, "PUT", b"address") == (200, b"")
        assert answer.result(120) == ask(port, "GET") == (200, b"address")


def test_a_rank_that_nobody_answers_can_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HOLD_S", 0.01)
    with rendezvous_server("127.0.0.1") as port:
        assert ask(port, "GET") == (404, b"")


def test_servers_share_nothing() -> None:
    with rendezvous_server("127.0.0.1") as one, rendezvous_server("127.0.0.1") as other:
        ask(one, "PUT", b"address")
        ask(other, "PUT", b"another")
        assert ask(one, "GET") == (200, b"address")
