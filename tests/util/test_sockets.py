from __future__ import annotations

import socket

import pytest

from hvd_autosync.util.sockets import address_towards, interface_address, read_exactly


def test_reading_waits_for_all_of_it() -> None:
    left, right = socket.socketpair()
    with left, right:
        for part in (b"ab", b"c", b"def"):
            left.sendall(part)
        assert read_exactly(right, 5) == b"abcde"
        left.close()
        with pytest.raises(ConnectionError, match="closed the connection"):
            read_exactly(right, 2)


def test_addresses_of_this_host() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError, match="nosuch0"):
        interface_address("nosuch0")
