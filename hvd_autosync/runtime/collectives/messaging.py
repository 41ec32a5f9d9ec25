"""Opens the mailboxes of a job: over MPI where Horovod runs over it, else over ZeroMQ."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import TypeVar

from horovod.torch.mpi_ops import mpi_enabled, rank, size

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.collectives.addresses import own_address
from hvd_autosync.runtime.collectives.agreement import gather_texts
from hvd_autosync.runtime.collectives.endpoint import Endpoint, MessageHandler
from hvd_autosync.runtime.collectives.transport import Transport
from hvd_autosync.search_space.horovod_settings import launched_by_mpi

__all__ = ["MessageHandler", "Endpoint", "check_messaging", "open_endpoint", "prepare_messaging"]

#: Longest wait for connections to all other ranks.
_CONNECTING_S = 60.0
_T = TypeVar("_T")


def prepare_messaging() -> None:
    """Import mpi4py in a job under MPI; to be called before ``hvd.init()`` if letters may be sent.

    The import initializes MPI, which Horovod then finds initialized. The other order crashes.
    """
    if launched_by_mpi(os.environ):
        with contextlib.suppress(ImportError):  # open_mailbox() tells
            import mpi4py.MPI  # noqa: F401


def check_messaging(name: str) -> None:
    """Return if this job has what mailboxes need; a collective, after ``hvd.init()``.

    Args:
        name: As of :func:`open_endpoint`, long before that.

    Raises:
        AutosyncError: Some rank lacks something; on all ranks.
    """
    _on_all(_needed, f"mail.{name}.check")


def _needed() -> None:
    if mpi_enabled():
        from hvd_autosync.runtime.collectives.transport_mpi import own_world_rank

        own_world_rank()
    else:
        from hvd_autosync.runtime.collectives.transport_zmq import check_build

        check_build()


def open_endpoint(name: str, on_message: MessageHandler) -> Endpoint:
    """A mailbox of this rank, which all others can reach; a collective, after ``hvd.init()``.

    Args:
        name: Tells its operations from those of others; equal on all ranks.
        heed: What to do with a letter. It may be called before this function returns, where
            another rank is faster.

    Raises:
        AutosyncError: Some rank cannot open it, or cannot reach another; on all ranks.
    """
    name = f"mail.{name}"
    carrier = _over_mpi(name) if mpi_enabled() else _over_zmq(name)
    endpoint = Endpoint(rank(), size(), carrier, on_message)
    try:
        _on_all(lambda: endpoint.await_connections(_CONNECTING_S), f"{name}.connections")
    except AutosyncError as error:
        endpoint.abandon(error.message)
        raise
    return endpoint


def _over_mpi(name: str) -> Transport:
    from hvd_autosync.runtime.collectives.transport_mpi import MpiTransport, own_world_rank

    own = _on_all(own_world_rank, f"{name}.world")
    return MpiTransport([int(text) for text in gather_texts(str(own), f"{name}.ranks")])


def _over_zmq(name: str) -> Transport:
    from hvd_autosync.runtime.collectives.transport_zmq import ZmqTransport

    carrier = _on_all(lambda: ZmqTransport(own_address(name)), f"{name}.ports")
    carrier.connect(rank(), gather_texts(carrier.card, f"{name}.cards"))
    return carrier


def _on_all(make: Callable[[], _T], name: str) -> _T:
    """What ``make`` returns, if it fails on no rank; a collective.

    Raises:
        AutosyncError: It fails on some rank.
    """
    trouble = None
    try:
        made = make()
    except AutosyncError as error:
        trouble = (error.message, error.hint)
    except Exception as error:
        trouble = (f"{type(error).__name__}: {error}", "")
    for other, told in enumerate(gather_texts(json.dumps(trouble), name)):
        if (theirs := json.loads(told)) is not None:
            message, hint = theirs
            raise AutosyncError(
                f"ranks cannot send each other letters; rank {other}: {message}",
                hint=hint
                or "Let the hosts of the job reach each other at any port of its "
                "network, or choose a strategy under which ranks wait for each other.",
            )
    return made
