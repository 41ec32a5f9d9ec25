"""What ranks end before ``hvd.join()``, and agree on anew when all have left it.

A rank with less data has made fewer steps. Whoever counts steps to act on all ranks at once would
from then on act at different times.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import weakref
from collections.abc import Callable

from horovod.torch import mpi_ops

from hvd_autosync.runtime.collectives.agreement import gather_texts


class JoinHook:
    """Somebody who counts steps."""

    def about_to_join(self) -> None:
        """Wait for every operation of its own that is under way between two steps.

        Horovod forgets a cached one that it finds beside the last rank's ``join()``: that is no
        longer among the responses (``ComputeResponseList`` in ``controller.cc``).
        """

    def all_joined(self) -> None:
        """All ranks have just left ``join()``; may use collectives."""
        raise NotImplementedError


#: By number, in the order in which they were made, which ranks have in common.
_JOINERS: weakref.WeakValueDictionary[int, JoinHook] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def tell_of_joins(joiner: JoinHook) -> None:
    """Tell ``joiner``, as long as it lives, of every ``join()``, before and after it."""
    watch_join()
    _JOINERS[next(_NUMBERS)] = joiner


@functools.cache
def watch_join() -> None:
    """See every ``join()`` of this process from now on; those imported before are not seen."""
    # A trial has patched it too, by the same names.
    join: Callable[..., int] = mpi_ops.join

    @functools.wraps(join)
    def joined(device: int = -1) -> int:
        for joiner in dict(_JOINERS).values():
            joiner.about_to_join()
        last = join(device)
        own = dict(_JOINERS)
        # Of optimizers that the script has dropped, some ranks may have kept the rest.
        told = [json.loads(text) for text in gather_texts(json.dumps([*own]), "joiners")]
        for number in sorted(set(own).intersection(*told)):
            own[number].all_joined()
        return last

    # While horovod.torch is being imported it is no attribute of horovod yet.
    for owner in (sys.modules["horovod.torch"], mpi_ops):
        vars(owner)["join"] = joined
