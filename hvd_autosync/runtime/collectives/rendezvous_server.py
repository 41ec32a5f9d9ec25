"""Horovod's rendezvous server, on one address only.

Horovod's ``RendezvousServer`` (``horovod/runner/http/http_server.py``) does the same on all of the
machine's addresses, and takes half a second to stop.
"""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

#: Interval at which the server checks whether it must stop; half a second in Horovod's own.
_POLL_S = 0.01


@contextmanager
def rendezvous_server(address: str, slots: Sequence[Any] = ()) -> Iterator[int]:
    """Run a rendezvous server while the context is open.

    Args:
        address: The address to listen on.
        slots: Horovod's ``SlotInfo`` of each rank, if ranks ask for theirs.

    Yields:
        Its port.
    """
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Server(RendezvousHTTPServer):  # type: ignore[misc]
        daemon_threads = True

        def server_bind(self) -> None:
            """Bind without the HTTP server's look-up of the host name, which can take seconds."""
            socketserver.TCPServer.server_bind(self)

    server = Server((address, 0), RendezvousHandler, 0)
    server.init(slots)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
