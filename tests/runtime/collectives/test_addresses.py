"""The address of a host's own name, where Gloo listens for process sets."""

from __future__ import annotations

import socket

import pytest

from hvd_autosync.runtime.collectives import addresses
from hvd_autosync.runtime.collectives.addresses import is_reached_by_name
from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks


@pytest.mark.parametrize("own", ["10.0.0.2", "127.0.1.1", "192.168.0.2", None])
def test_a_host_whose_name_leads_elsewhere(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's installer lets it lead to a loopback address; it may have no address."""

    def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        address = {"a": "10.0.0.1", "b": own}[host]
        if address is None:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(addresses.socket, "gethostname", lambda: "ab"[rank()])
    monkeypatch.setattr(addresses.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(addresses, "address_towards", lambda _: f"10.0.0.{rank() + 1}")
    addresses._address_of_name.cache_clear()
    reached = ThreadRanks(2, seed=0).run(lambda: is_reached_by_name("own"))
    addresses._address_of_name.cache_clear()
    assert reached == [True, own == "10.0.0.2"]


def test_ranks_of_one_host_reach_each_other_whatever_its_name_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses.socket, "gethostname", lambda: "a")
    monkeypatch.setattr(addresses, "_address_of_name", lambda _: "127.0.1.1")
    assert ThreadRanks(2, seed=0).run(lambda: is_reached_by_name("own")) == [True, True]
