"""Helpers for TCP connections."""

from __future__ import annotations

import socket
from time import monotonic


def read_exactly(sock: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """Read the next ``count`` bytes.

    Args:
        sock: The connection.
        count: Number of bytes.
        deadline: Time by which all must have arrived, by the monotonic clock; it changes the
            socket's timeout, which applies to each part alone.

    Raises:
        OSError: The peer has closed the connection, or sends nothing within the socket's timeout.
    """
    data = bytearray(count)
    view, filled = memoryview(data), 0
    while filled < count:
        if deadline is not None:
            sock.settimeout(time_left(deadline))
        received = sock.recv_into(view[filled:])
        if not received:
            raise ConnectionError("the peer has closed the connection")
        filled += received
    return bytes(data)


def time_left(deadline: float) -> float:
    """Return the seconds until ``deadline``, by the monotonic clock.

    Raises:
        TimeoutError: The deadline has passed.
    """
    left_s = deadline - monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def keep_alive(sock: socket.socket) -> None:
    """Let the connection fail about 25 seconds after the peer's host has become unreachable."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface of this host.

    Raises:
        OSError: The interface does not exist or has no IPv4 address.
    """
    import psutil

    for each in psutil.net_if_addrs().get(name, []):
        if each.family == socket.AF_INET:
            return str(each.address)
    raise OSError(f"network interface {name} has no IPv4 address here")


def own_addresses() -> set[str]:
    """Return the addresses of this host's network interfaces."""
    import psutil

    return {str(each.address) for all_of in psutil.net_if_addrs().values() for each in all_of}


def address_towards(host: str) -> str:
    """Return the IPv4 address from which this host reaches ``host``, without sending anything.

    Raises:
        OSError: There is no route to the host.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
