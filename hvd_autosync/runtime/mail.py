"""Opens the mailboxes of a job: over MPI where Horovod runs over it, else over ZeroMQ."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from horovod.torch.mpi_ops import rank, size

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.addresses import own_address
from hvd_autosync.runtime.agreement import gather_texts
from hvd_autosync.runtime.carrier import Carrier
from hvd_autosync.runtime.mailbox import Heed, Mailbox

__all__ = ["Heed", "Mailbox", "open_mailbox"]

#: Longest wait for connections to all other ranks.
_CONNECTING_S = 60.0
_T = TypeVar("_T")


def open_mailbox(name: str, heed: Heed) -> Mailbox:
    """A mailbox of this rank, which all others can reach; a collective, after ``hvd.init()``.

    Args:
        name: Tells its operations from those of others; equal on all ranks.
        heed: What to do with a letter. It may be called before this function returns, where
            another rank is faster.

    Raises:
        AutosyncError: Some rank cannot open it, or cannot reach another; on all ranks.
    """
    mailbox = Mailbox(rank(), size(), _over_zmq(name), heed)
    try:
        _on_all(lambda: mailbox.await_connections(_CONNECTING_S), f"{name}.connections")
    except AutosyncError as error:
        mailbox.abandon(error.message)
        raise
    return mailbox


def _over_zmq(name: str) -> Carrier:
    def make() -> ZmqCarrier:
        return ZmqCarrier(own_address(name))

    from hvd_autosync.runtime.mail_zmq import ZmqCarrier

    carrier = _on_all(make, f"{name}.ports")
    carrier.connect(rank(), gather_texts(carrier.card, f"{name}.cards"))
    return carrier


def _on_all(make: Callable[[], _T], name: str) -> _T:
    """What ``make`` returns, if it fails on no rank; a collective.

    Raises:
        AutosyncError: It fails on some rank.
    """
    trouble = "none"
    try:
        made = make()
    except AutosyncError as error:
        trouble = error.message
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
    for other, told in enumerate(gather_texts(trouble, f"mail.{name}")):
        if told != "none":
            raise AutosyncError(
                f"ranks cannot send each other letters; rank {other}: {told}",
                hint="Let the hosts of the job reach each other at any port of its network, or "
                "choose a strategy under which ranks wait for each other.",
            )
    return made
