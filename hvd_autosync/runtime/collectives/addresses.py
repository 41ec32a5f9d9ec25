"""Addresses at which the other ranks reach this host."""

from __future__ import annotations

import functools
import os
import socket
from ipaddress import ip_address

from hvd_autosync.runtime.collectives.agreement import gather_texts
from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.search_space.horovod_settings import OWN_INTERFACE
from hvd_autosync.util.sockets import address_towards, interface_address, own_addresses


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
        return "127.0.0.1"
    interface = os.environ.get(OWN_INTERFACE)  # set by Horovod's launcher for Gloo
    return interface_address(interface) if interface else address_towards(others[0])


def is_reached_by_name(name: str) -> bool:
    """Return whether other hosts can connect to the address of this one's name; a collective.

    Gloo listens there for each process set, whatever interface the job has (``gloo_context.cc``).
    Whether a firewall is between them is not known.

    Args:
        name: Name of the operation.
    """
    hosts = gather_texts(socket.gethostname(), f"names.{name}")
    return len(set(hosts)) == 1 or _leads_to_an_interface(hosts[rank()])


@functools.cache
def _leads_to_an_interface(host: str) -> bool:
    """Return whether a name's first address is one of this host, and no loopback address."""
    try:
        (_, _, _, _, (address, *_)), *_ = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return not ip_address(address).is_loopback and address in own_addresses()
