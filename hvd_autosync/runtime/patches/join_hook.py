"""Join hooks: what ranks finish before ``hvd.join()``, and agree on when all have left it.

A rank with less data has made fewer steps. From then on, components that count steps would act at
different times on different ranks.
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
    """A component that counts steps."""

    def about_to_join(self) -> None:
        """Wait for all own operations that are in progress between two steps.

        Horovod forgets a cached operation that it finds beside the last rank's ``join()``: it is no
        longer among the responses (``ComputeResponseList`` in ``controller.cc``).
        """

    def all_joined(self) -> None:
        """All ranks have just left ``join()``; collectives are allowed."""
        raise NotImplementedError


#: By number, in order of creation, which is the same on all ranks.
_JOIN_HOOKS: weakref.WeakValueDictionary[int, JoinHook] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def register_join_hook(hook: JoinHook) -> None:
    """Call the methods of ``hook`` before and after every ``join()``, as long as it lives."""
    watch_join()
    _JOIN_HOOKS[next(_NUMBERS)] = hook


@functools.cache
def watch_join() -> None:
    """Watch every ``join()`` of this process from now on, except under names imported before."""
    # A trial has patched the same names.
    join: Callable[..., int] = mpi_ops.join

    @functools.wraps(join)
    def joined(device: int = -1) -> int:
        for hook in dict(_JOIN_HOOKS).values():
            hook.about_to_join()
        last = join(device)
        own = dict(_JOIN_HOOKS)
        # Some ranks may still hold hooks of dropped optimizers, others not.
        all_numbers = [json.loads(text) for text in gather_texts(json.dumps([*own]), "join hooks")]
        for number in sorted(set(own).intersection(*all_numbers)):
            own[number].all_joined()
        return last

    # While horovod.torch is being imported, horovod has no attribute torch yet.
    for owner in (sys.modules["horovod.torch"], mpi_ops):
        vars(owner)["join"] = joined
