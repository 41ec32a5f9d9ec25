"""The address of a host's own name, where Gloo listens for process sets."""

from __future__ import annotations

import socket

import pytest

from hvd_autosync.runtime.collectives import addresses
from hvd_autosync.runtime.collectives.addresses import is_reached_by_name
from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks


@pytest.mark.parametrize(
    ("own", "reached"),
    [
        ("10.0.0.2", True),
        ("192.168.0.2", True),  # of another interface than that of the job
        ("fd00::2", True),
        ("127.0.1.1", False),  # of Debian's installer
        ("127.0.0.1", False),
        ("10.9.9.9", False),  # as of a host that had the name before
        (None, False),
    ],
)
def test_a_host_is_reached_where_its_name_leads_to_an_interface(
    own: str | None, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        address = {"a": "10.0.0.1", "b": own}[host]
        if address is None:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    interfaces = {"127.0.0.1", "10.0.0.1", "10.0.0.2", "192.168.0.2", "fd00::2"}
    monkeypatch.setattr(addresses.socket, "gethostname", lambda: "ab"[rank()])
    monkeypatch.setattr(addresses.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(addresses, "own_addresses", lambda: interfaces)
    addresses._leads_to_an_interface.cache_clear()
    found = ThreadRanks(2, seed=0).run(lambda: is_reached_by_name("own"))
    addresses._leads_to_an_interface.cache_clear()
    assert found == [True, reached]


def test_ranks_of_one_host_reach_each_other_whatever_its_name_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses.socket, "gethostname", lambda: "a")
    monkeypatch.setattr(addresses, "_leads_to_an_interface", lambda _: False)
    assert ThreadRanks(2, seed=0).run(lambda: is_reached_by_name("own")) == [True, True]
