"""What ranks agree on anew when all have left ``hvd.join()``.

A rank with less data has made fewer steps. Whoever counts steps to act on all ranks at once would
from then on act at different times.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Protocol

from horovod.torch import mpi_ops


class Joiner(Protocol):
    """Somebody who counts steps."""

    def all_joined(self) -> None:
        """All ranks have just left ``join()``; may use collectives."""


#: In the order in which they were made, which ranks have in common.
_JOINERS: list[weakref.ref[Joiner]] = []


def tell_after_join(joiner: Joiner) -> None:
    """Tell ``joiner``, as long as it lives, whenever all ranks have left ``join()``."""
    watch_join()
    _JOINERS.append(weakref.ref(joiner, _JOINERS.remove))


@functools.cache
def watch_join() -> None:
    """See every ``join()`` of this process from now on; those imported before are not seen."""
    # A trial has patched it too, by the same names.
    join: Callable[..., int] = mpi_ops.join

    @functools.wraps(join)
    def joined(device: int = -1) -> int:
        last = join(device)
        gc.collect()  # of optimizers that the script has dropped, some ranks may have kept the rest
        for joiner in [alive for each in _JOINERS if (alive := each()) is not None]:
            joiner.all_joined()
        return last

    # While horovod.torch is being imported it is no attribute of horovod yet.
    for owner in (sys.modules["horovod.torch"], mpi_ops):
        vars(owner)["join"] = joined
