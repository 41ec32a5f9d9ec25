"""Join hooks: what ranks finish before ``hvd.join()``, and agree on when all have left it.

A rank with less data has made fewer steps. From then on, components that count steps would act at
different times on different ranks.
"""

from __future__ import annotations

import itertools
import json
import weakref

from hvd_autosync.runtime.collectives.agreement import gather_texts
from hvd_autosync.runtime.collectives.operations import collectives, once_per_rank
from hvd_autosync.runtime.collectives.protocol import Join


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


class _Hooks:
    """The join hooks of one rank."""

    def __init__(self) -> None:
        #: By number, in order of creation, which is the same on all ranks.
        self.by_number: weakref.WeakValueDictionary[int, JoinHook] = weakref.WeakValueDictionary()
        self.numbers = itertools.count()

    def wrap(self, join: Join) -> Join:
        """Call the hooks' methods before and after ``join``."""

        def joined(device: int) -> int:
            for hook in dict(self.by_number).values():
                hook.about_to_join()
            last = join(device)
            own = dict(self.by_number)
            # Some ranks may still hold hooks of dropped optimizers, others not.
            texts = gather_texts(json.dumps([*own]), "join hooks")
            for number in sorted(set(own).intersection(*map(json.loads, texts))):
                own[number].all_joined()
            return last

        return joined


def register_join_hook(hook: JoinHook) -> None:
    """Call the methods of ``hook`` before and after every ``join()``, as long as it lives."""
    hooks = watch_join()
    hooks.by_number[next(hooks.numbers)] = hook


def remove_join_hook(hook: JoinHook) -> None:
    """Call the methods of ``hook`` no more; on all ranks."""
    by_number = watch_join().by_number
    for number in [number for number, each in by_number.items() if each is hook]:
        del by_number[number]


@once_per_rank
def watch_join() -> _Hooks:
    """Watch every ``join()`` of this rank from now on, except under names imported before."""
    hooks = _Hooks()
    collectives().wrap_join(hooks.wrap)  # a trial has wrapped it too
    return hooks
