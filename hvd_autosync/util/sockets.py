"""What every TCP connection of ours needs."""

from __future__ import annotations

import socket
from time import monotonic


def read_exactly(sock: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """The next ``count`` bytes.

    Args:
        sock: The connection.
        count: How many.
        deadline: Latest end of it all, by the monotonic clock; the socket's timeout, which is for
            each part, is changed.

    Raises:
        OSError: The peer is gone, or silent for longer than the socket's timeout.
    """
    data = bytearray(count)
    view, filled = memoryview(data), 0
    while filled < count:
        if deadline is not None:
            sock.settimeout(time_left(deadline))
        received = sock.recv_into(view[filled:])
        if not received:
            raise ConnectionError("the peer is gone")
        filled += received
    return bytes(data)


def time_left(deadline: float) -> float:
    """Seconds to ``deadline``, by the monotonic clock.

    Raises:
        TimeoutError: There are none.
    """
    left_s = deadline - monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def keep_alive(sock: socket.socket) -> None:
    """Have the peer's silence noticed, as when its host was cut off, within about 25 seconds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface of this host.

    Raises:
        OSError: It has none.
    """
    import psutil

    for each in psutil.net_if_addrs().get(name, []):
        if each.family == socket.AF_INET:
            return str(each.address)
    raise OSError(f"network interface {name} has no IPv4 address here")


def address_towards(host: str) -> str:
    """The IPv4 address from which this host reaches ``host``; nothing is sent.

    Raises:
        OSError: There is no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
