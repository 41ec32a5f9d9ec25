"""The rendezvous of one warm trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hvd_autosync.runtime.collectives.rendezvous_server import rendezvous_server
from hvd_autosync.search_space import Host
from hvd_autosync.search_space.horovod_settings import RENDEZVOUS_PORT


@contextmanager
def rendezvous(address: str, hosts: Sequence[Host]) -> Iterator[list[dict[str, str]]]:
    """Run a rendezvous server while the context is open.

    Args:
        address: The address to listen on.
        hosts: Hosts and slots of the job, in rank order.

    Yields:
        The environment variables of each rank, in rank order.
    """
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.gloo_run import create_slot_env_vars

    world_size = sum(host.slots for host in hosts)
    plan = get_host_assignments([HostInfo(h.name, h.slots) for h in hosts], world_size)
    with rendezvous_server(address, plan) as port:
        yield [create_slot_env_vars(slot) | {RENDEZVOUS_PORT: str(port)} for slot in plan]
