"""Where the ranks of one warm trial meet: Horovod's rendezvous server, on one address only."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hvd_autosync.search_space import Host
from hvd_autosync.search_space.horovod_settings import RENDEZVOUS_PORT

#: Horovod's own server looks every half second whether it shall stop.
_POLL_S = 0.01


@contextmanager
def rendezvous(address: str, hosts: Sequence[Host]) -> Iterator[list[dict[str, str]]]:
    """Serve one meeting of all ranks; the value is the variables of each rank, in their order.

    Horovod's ``RendezvousServer`` (``horovod/runner/http/http_server.py``) does the same on all
    of the machine's addresses.

    Args:
        address: The address to listen on.
        hosts: Hosts and slots of the job, in rank order.
    """
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Server(RendezvousHTTPServer):  # type: ignore[misc]
        daemon_threads = True

        def server_bind(self) -> None:
            """Without the look-up of a name that HTTP servers make, which can take seconds."""
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
