"""Finds the address at which the other ranks reach this host."""

from __future__ import annotations

import os
import socket

from hvd_autosync.runtime.collectives.agreement import gather_texts
from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.search_space.horovod_settings import OWN_INTERFACE
from hvd_autosync.util.sockets import address_towards, interface_address


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
