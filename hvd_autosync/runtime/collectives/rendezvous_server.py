"""Horovod's rendezvous server, on one address only.

Horovod's ``RendezvousServer`` (``horovod/runner/http/http_server.py``) does the same on all of the
machine's addresses, and takes half a second to stop. It also answers at once when a rank asks for
what another has not told yet, and then that rank sleeps for 10 ms (``HTTPStore::wait`` in
``horovod/common/gloo/http_store.cc``), as often as there are others; here the answer waits.
"""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

#: Interval at which the server checks whether it must stop; half a second in Horovod's own.
_POLL_S = 0.01
#: Longest time for which an answer waits for what is asked; then the rank asks again, and may end.
_HOLD_S = 1.0


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

    class Handler(RendezvousHandler):  # type: ignore[misc]
        def _get_value(self, scope: str, key: str) -> bytes | None:
            known = partial(super()._get_value, scope, key)
            with self.server.news:
                self.server.news.wait_for(lambda: known() is not None, _HOLD_S)
            value: bytes | None = known()
            return value

        def _put_value(self, scope: str, key: str, value: bytes) -> None:
            with self.server.news:
                super()._put_value(scope, key, value)
                self.server.news.notify_all()

    class Server(RendezvousHTTPServer):  # type: ignore[misc]
        daemon_threads = True
        news = threading.Condition()

        def server_bind(self) -> None:
            """Bind without the HTTP server's look-up of the host name, which can take seconds."""
            socketserver.TCPServer.server_bind(self)

    server = Server((address, 0), Handler, 0)
    server.init(slots)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread is left
        server.server_close()
        raise
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
