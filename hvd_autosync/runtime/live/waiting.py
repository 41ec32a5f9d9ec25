"""Whether this rank waits for others in an exchange of ours, as seen from another thread.

Only such a wait can be the fault of a strategy. A rank that evaluates, saves, loads data or waits
in ``join()`` may take as long as it likes.
"""

from __future__ import annotations

import sys
from types import FrameType

_OPERATIONS = "horovod.torch.mpi_ops"
_OURS = "hvd_autosync.runtime."
#: Where our code waits in pauses, before it calls Horovod's ``synchronize()``: for an operation if
#: ranks have one processor each, and for whichever of several is done first.
_PAUSES = {
    ("hvd_autosync.runtime.collectives.over_horovod", "_wait"),
    ("hvd_autosync.runtime.exchange.dispatcher", "_await_any"),
}


def waits_in_exchange() -> bool:
    """Return whether a thread of this process waits for an operation that our code has called."""
    return any(_waits(frame) for frame in sys._current_frames().values())


def _waits(frame: FrameType | None) -> bool:
    called = []
    while frame is not None and _module(frame) == _OPERATIONS:
        called.append(frame.f_code.co_name)
        frame = frame.f_back
    if frame is None or not _module(frame).startswith(_OURS):
        return False
    if (_module(frame), frame.f_code.co_name) in _PAUSES:  # between two looks, or in one
        return True
    return "synchronize" in called and "join" not in called


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
