"""Addresses at which the other ranks reach this host."""

from __future__ import annotations

import functools
import os
import socket

from hvd_autosync.runtime.collectives.agreement import gather_texts
from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.search_space.horovod_settings import OWN_INTERFACE
from hvd_autosync.util.sockets import address_towards, interface_address

_LOOPBACK = "127.0.0.1"


def own_address(name: str) -> str:
    """Return the address at which the other ranks reach this host; a collective.

    It is 127.0.0.1 if the job has one host.

    Args:
        name: Name of the operation.

    Raises:
        OSError: The job's interface has no IPv4 address, or there is no route to another host.
    """
    hosts = gather_texts(socket.gethostname(), f"hosts.{name}")
    others = [host for host in hosts if host != hosts[rank()]]
    if not others:
        return _LOOPBACK
    interface = os.environ.get(OWN_INTERFACE)  # set by Horovod's launcher for Gloo
    return interface_address(interface) if interface else address_towards(others[0])


def is_reached_by_name(name: str) -> bool:
    """Return whether the other ranks reach this host at the address of its own name; a collective.

    Gloo listens there for each process set, whatever interface the job has (``gloo_context.cc``).

    Args:
        name: Name of the operation.
    """
    try:
        address = own_address(name)
    except OSError:  # after the collective
        return False
    return address in (_LOOPBACK, _address_of_name(socket.gethostname()))


@functools.cache
def _address_of_name(host: str) -> str:
    """Return the first address to which the name of this host resolves; empty if there is none."""
    try:
        first, *_ = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    return str(first[4][0])
