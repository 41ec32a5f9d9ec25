"""The rendezvous server of one warm trial: Horovod's own, on one address only."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hvd_autosync.search_space import Host
from hvd_autosync.search_space.horovod_settings import RENDEZVOUS_PORT

#: Interval at which the server checks whether it must stop; half a second in Horovod's own.
_POLL_S = 0.01


@contextmanager
def rendezvous(address: str, hosts: Sequence[Host]) -> Iterator[list[dict[str, str]]]:
    """Run a rendezvous server while the context is open.

    Horovod's ``RendezvousServer`` (``horovod/runner/http/http_server.py``) does the same on all
    of the machine's addresses.

    Args:
        address: The address to listen on.
        hosts: Hosts and slots of the job, in rank order.

    Yields:
        The environment variables of each rank, in rank order.
    """
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Server(RendezvousHTTPServer):  # type: ignore[misc]
        daemon_threads = True

        def server_bind(self) -> None:
            """Bind without the HTTP server's look-up of the host name, which can take seconds."""
            socketserver.TCPServer.server_bind(self)

    world_size = sum(host.slots for host in hosts)
    plan = get_host_assignments([HostInfo(h.name, h.slots) for h in hosts], world_size)
    server = Server((address, 0), RendezvousHandler, 0)
    server.init(plan)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True)
    thread.start()
    try:
        port = {RENDEZVOUS_PORT: str(server.server_address[1])}
        yield [create_slot_env_vars(slot) | port for slot in plan]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
