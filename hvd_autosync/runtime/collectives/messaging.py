"""Opens the message endpoints of a job: over MPI where Horovod uses it, else over ZeroMQ."""

from __future__ import annotations

import os

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.collectives.addresses import own_address
from hvd_autosync.runtime.collectives.agreement import gather_texts, on_all
from hvd_autosync.runtime.collectives.endpoint import Endpoint, MessageHandler
from hvd_autosync.runtime.collectives.launcher_use import finalize_at_end, import_mpi4py
from hvd_autosync.runtime.collectives.operations import mpi_enabled, rank, size
from hvd_autosync.runtime.collectives.transport import Transport
from hvd_autosync.search_space.horovod_settings import launched_by_mpi

__all__ = ["Endpoint", "MessageHandler", "check_messaging", "open_endpoint", "prepare_messaging"]

#: Longest wait for connections to all other ranks.
_CONNECTING_S = 60.0
#: What to say if some rank cannot, and what to do.
_CANNOT = (
    "ranks cannot send each other messages",
    "Let the hosts of the job reach each other on any port of the job's network, or choose a "
    "strategy under which ranks wait for each other.",
)


def prepare_messaging() -> None:
    """Import mpi4py in a job under MPI; call it before ``hvd.init()`` if messages may be sent.

    The import initializes MPI, and Horovod then uses the initialized MPI. The other order crashes.
    """
    if launched_by_mpi(os.environ):
        finalize_at_end()
        import_mpi4py()  # open_endpoint() reports where it is not installed


def check_messaging(name: str) -> None:
    """Check that this job can open message endpoints; a collective, after ``hvd.init()``.

    Args:
        name: The name that :func:`open_endpoint` will be called with, much later.

    Raises:
        AutosyncError: Some rank cannot; raised on all ranks.
    """
    on_all(_needed, f"messages.{name}.check", *_CANNOT)


def _needed() -> None:
    if mpi_enabled():
        from hvd_autosync.runtime.collectives.transport_mpi import own_world_rank

        own_world_rank()
    else:
        from hvd_autosync.runtime.collectives.transport_zmq import check_build

        check_build()


def open_endpoint(name: str, on_message: MessageHandler) -> Endpoint:
    """Open a message endpoint that all other ranks can reach; a collective, after ``hvd.init()``.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        on_message: Handles a message. It may be called before this function returns, if another
            rank is faster.

    Raises:
        AutosyncError: Some rank cannot open its endpoint, or cannot reach another rank; raised on
            all ranks.
    """
    name = f"messages.{name}"
    transport = _over_mpi(name) if mpi_enabled() else _over_zmq(name)
    endpoint = Endpoint(rank(), size(), transport, on_message)
    try:
        on_all(lambda: endpoint.await_connections(_CONNECTING_S), f"{name}.connections", *_CANNOT)
    except AutosyncError as error:
        endpoint.abort(error.message)
        raise
    return endpoint


def _over_mpi(name: str) -> Transport:
    from hvd_autosync.runtime.collectives.transport_mpi import MpiTransport, own_world_rank

    own = on_all(own_world_rank, f"{name}.world", *_CANNOT)
    return MpiTransport([int(text) for text in gather_texts(str(own), f"{name}.ranks")])


def _over_zmq(name: str) -> Transport:
    from hvd_autosync.runtime.collectives.transport_zmq import ZmqTransport

    transport = on_all(lambda: ZmqTransport(own_address(name)), f"{name}.ports", *_CANNOT)
    transport.connect(rank(), gather_texts(transport.endpoint_info, f"{name}.endpoint_infos"))
    return transport
